#!/usr/bin/env python3
"""Draws the result of the demo, docs/demo.svg, from a run of it.

    scripts/demo_picture.py
"""

import html
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH, ROW, TOP = 800, 58, 62

output = subprocess.run(
    ["cargo", "run", "--quiet", "--example", "reward_claim", "--", "--demo"],
    cwd=ROOT, check=True, capture_output=True, text=True,
).stdout
lines = [line for line in output.splitlines() if line.strip()]
title = next(line.strip() for line in lines if line.strip().endswith("at the same time."))
rule = next(i for i, line in enumerate(lines) if set(line.strip()) <= {"─", " "})
rows = [re.split(r"\s{3,}", line.strip()) for line in lines[rule + 1 : rule + 5]]

parts = []
for number, (name, records, responses, _waited, slowest) in enumerate(rows):
    y = TOP + number * ROW
    count = int(records)
    kind = "good" if count == 1 else "bad"
    dots = "".join(
        f'<circle class="{kind if dot < count else "none"}" cx="{270 + dot * 22}" cy="{y + 20}" r="8"/>'
        for dot in range(5)
    )
    word = "record" if count == 1 else "records"
    parts.append(
        f'<line class="rule" x1="24" x2="{WIDTH - 24}" y1="{y - 10}" y2="{y - 10}"/>'
        f'<text class="name" x="24" y="{y + 25}">{html.escape(name)}</text>{dots}'
        f'<text class="{kind} count" x="392" y="{y + 25}">{count} {word}</text>'
        f'<text class="text" x="478" y="{y + 16}">{html.escape(responses)}</text>'
        f'<text class="faint" x="478" y="{y + 35}">slowest response: {html.escape(slowest)}</text>'
    )

height = TOP + len(rows) * ROW + 6
svg = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(title)}">
<style>
text {{ font: 14px system-ui, sans-serif; fill: #1f2328 }}
.title {{ font-weight: 600; font-size: 15px }}
.faint {{ fill: #59636e; font-size: 12px }}
.text {{ font-size: 13px }}
.count {{ font-weight: 600 }}
.rule {{ stroke: #d1d9e0 }}
.good {{ fill: #1a7f37 }}
.bad {{ fill: #cf222e }}
.none {{ fill: none; stroke: #d1d9e0 }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #f0f6fc }}
  .faint {{ fill: #9198a1 }}
  .rule, .none {{ stroke: #3d444d }}
  .good {{ fill: #3fb950 }}
  .bad {{ fill: #f85149 }}
}}
</style>
<text class="title" x="24" y="30">{html.escape(title)}</text>
{"".join(parts)}
</svg>
"""
(ROOT / "docs" / "demo.svg").write_text(svg)
