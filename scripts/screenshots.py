#!/usr/bin/env python3
"""Makes the pictures of the page `console` of the guide, from the pages of a test.

    scripts/screenshots.py

Needs `chromium` and `chromedriver`. A page on the web shows `docs/guide/images/*.png`. rustdoc has no
place for files beside a page, so the same pictures are in `src/pictures.txt` as data URLs.
"""

import base64
import collections
import pathlib
import struct
import subprocess
import sys
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEST = ["--package=tower-lock-tests", "--test=browser", "--", "--ignored", "--nocapture", "pictures::"]
MOST_BYTES = 60_000
# The letters have shades of grey, and links and buttons those of two colours.
COLOURS = 64


def pixels(png):
    """The size of a picture of 8 bits for each colour, and its rows of (red, green, blue)."""
    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, chunk = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colours, *_ = struct.unpack(">IIBBBBB", chunk)
        elif kind == b"IDAT":
            data += chunk
        at += length + 12
    assert depth == 8 and colours in (2, 6), "not the format of a screenshot"
    size = 3 if colours == 2 else 4
    data, before, rows = zlib.decompress(data), bytes(width * size), []
    for y in range(height):
        start = y * (width * size + 1)
        kind, row = data[start], bytearray(data[start + 1 : start + 1 + width * size])
        for x, value in enumerate(row):
            left = row[x - size] if x >= size else 0
            up, corner = before[x], before[x - size] if x >= size else 0
            row[x] = (value + predicted(kind, left, up, corner)) & 255
        rows.append([tuple(row[x : x + 3]) for x in range(0, len(row), size)])
        before = row
    return width, height, rows


def predicted(kind, left, up, corner):
    if kind < 4:
        return (0, left, up, (left + up) // 2)[kind]
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def reduced(png):
    """The same picture with its most frequent colours, and the nearest one for each other."""
    width, height, rows = pixels(png)
    counts = collections.Counter(pixel for row in rows for pixel in row)
    palette = [pixel for pixel, _ in counts.most_common(COLOURS)]
    distance = lambda one, other: sum((a - b) ** 2 for a, b in zip(one, other))
    number = {pixel: min(range(len(palette)), key=lambda at: distance(palette[at], pixel)) for pixel in counts}
    lines = b"".join(b"\0" + bytes(number[pixel] for pixel in row) for row in rows)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(map(bytes, palette))),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    parts = (struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def main():
    output = subprocess.run(["cargo", "test", "--quiet", *TEST], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [line.split("picture ", 1)[1].split() for line in output.splitlines() if "picture " in line]
    if not found:
        sys.exit("no picture: install chromium and chromedriver")
    folder, definitions = ROOT / "docs/guide/images", []
    folder.mkdir(exist_ok=True)
    for name, text in found:
        png = reduced(base64.b64decode(text))
        assert len(png) < MOST_BYTES, f"{name}: {len(png)} bytes"
        (folder / f"console-{name}.png").write_bytes(png)
        definitions.append(f"[picture-{name}]: data:image/png;base64,{base64.b64encode(png).decode()}\n")
        print(f"console-{name}.png: {len(png)} bytes")
    (ROOT / "src/pictures.txt").write_text("".join(definitions))


if __name__ == "__main__":
    main()
