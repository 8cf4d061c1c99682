#!/usr/bin/env python3
"""Draws the results of the demos, docs/{agent,demo,gateway,transfer}.svg, from a run of each.

    scripts/demo_picture.py                # all
    scripts/demo_picture.py transfer       # the one of this example
"""

import html
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH, ROW, TOP = 800, 58, 62


def claimed(records, _responses):
    """A dot for each record that was inserted: there must be one."""
    count = int(records)
    kind = "good" if count == 1 else "bad"
    word = "record" if count == 1 else "records"
    return [kind] * count + ["none"] * (5 - count), kind, f"{count} {word}"


def transferred(money, responses):
    """A dot for each transfer that is done. The money must stay the same."""
    done = sum(int(count) for count in re.findall(r"(\d+) × 200", responses))
    kind = "good" if money == "500" else "bad"
    return ["good"] * done + ["rejected"] * (5 - done), kind, f"{money} of 500"


def completed(at_once, responses):
    """A dot for each completion. At most six may run at the same time."""
    served, rejected = (sum(map(int, re.findall(rf"(\d+) × {status}", responses))) for status in (200, 429))
    kind = "good" if int(at_once.split()[0]) <= 6 else "bad"
    return [kind] * served + ["rejected"] * rejected, kind, at_once


def answered(last, responses):
    """A dot for each message. The last one must be answered at once."""
    kinds = {"answered": "good", "stopped": "none", "rejected": "rejected"}
    found = re.findall(r"(\d+) × \d+ (\w+)", responses)
    dots = [kinds[how] for count, how in found for _ in range(int(count))]
    return dots, "good" if last == "at once" else "bad", last


# The picture of each example, and the dots, the colour and the text of a row.
PICTURES = {
    "agent": ("agent.svg", answered),
    "reward_claim": ("demo.svg", claimed),
    "gateway": ("gateway.svg", completed),
    "transfer": ("transfer.svg", transferred),
}


def table(example):
    """The sentence above the table, and its rows."""
    output = subprocess.run(
        ["cargo", "run", "--quiet", "--example", example, "--", "--demo"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout
    lines = [line.strip() for line in output.splitlines()]
    title = next(line for line in lines if line.endswith("at the same time."))
    first = next(i for i, line in enumerate(lines) if line and set(line) <= {"─", " "}) + 1
    end = lines.index("", first)
    return title, [re.split(r"\s{3,}", line) for line in lines[first:end]]


def draw(example):
    picture, shown = PICTURES[example]
    title, rows = table(example)
    parts = []
    for number, (name, result, responses, _waited, slowest) in enumerate(rows):
        y = TOP + number * ROW
        kinds, kind, text = shown(result, responses)
        # Two lines of dots, if there are many.
        line = 6 if len(kinds) > 6 else len(kinds)
        pitch, radius, top, count = (18, 6, 12, 382) if len(kinds) > 6 else (22, 8, 20, 392)
        dots = "".join(
            f'<circle class="{dot}" cx="{270 + n % line * pitch}" cy="{y + top + n // line * 17}" r="{radius}"/>'
            for n, dot in enumerate(kinds)
        )
        parts.append(
            f'<line class="rule" x1="24" x2="{WIDTH - 24}" y1="{y - 10}" y2="{y - 10}"/>'
            f'<text class="name" x="24" y="{y + 25}">{html.escape(name)}</text>{dots}'
            f'<text class="{kind} count" x="{count}" y="{y + 25}">{text}</text>'
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
.rejected {{ fill: none; stroke: #cf222e }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #f0f6fc }}
  .faint {{ fill: #9198a1 }}
  .rule, .none {{ stroke: #3d444d }}
  .good {{ fill: #3fb950 }}
  .bad {{ fill: #f85149 }}
  .rejected {{ stroke: #f85149 }}
}}
</style>
<text class="title" x="24" y="30">{html.escape(title)}</text>
{"".join(parts)}
</svg>
"""
    (ROOT / "docs" / picture).write_text(svg)


for example in sys.argv[1:] or PICTURES:
    draw(example)
