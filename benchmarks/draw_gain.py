"""Draw the speedup from reuse to docs/figures/gain.svg, from benchmarks/results/ttft-float32.json.

    python benchmarks/draw_gain.py

The figure consists of SVG text and rectangles. Its colors follow the reader's light or dark mode.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ttft-float32.json"
FIGURE = ROOT / "docs" / "figures" / "gain.svg"

WIDTH, LEFT, RIGHT = 760, 90, 90
TOP, ROW, BAR = 92, 58, 20

STYLE = """
    svg { font: 15px system-ui, sans-serif; }
    .card { fill: #ffffff; }  text { fill: #1f2328; }
    .head { font-size: 18px; font-weight: 600; }  .note { font-size: 12px; fill: #59636e; }
    .full { fill: #b5bcc6; }  .block { fill: #0b7a75; }  .gain { font-weight: 600; fill: #0b7a75; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #1e2129; }  text { fill: #e6e9ee; }  .note { fill: #a3abb8; }
      .full { fill: #5d6675; }  .block { fill: #35c4bb; }  .gain { fill: #35c4bb; }
    }"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(y: float, length: float, kind: str) -> str:
    return f'<rect x="{LEFT}" y="{y:g}" width="{length:.1f}" height="{BAR}" class="{kind}"/>'


def rows(data: Mapping[str, Any]) -> list[str]:
    """Return the SVG of two bars per context length, with their times and the ratio of the two."""
    scale = (WIDTH - LEFT - RIGHT) / max(row["full_s"] for row in data["rows"])
    parts: list[str] = []
    for i, row in enumerate(data["rows"]):
        y, full_s, block_s = TOP + i * ROW, row["full_s"], row["relay_s"]
        parts += [
            text(LEFT - 12, y + BAR + 6, f"{row['length']:,}", anchor="end"),
            bar(y, full_s * scale, "full"),
            bar(y + BAR + 2, block_s * scale, "block"),
            text(LEFT + full_s * scale + 8, y + 15, f"{full_s:.1f} s"),
            text(LEFT + block_s * scale + 8, y + BAR + 17, f"{block_s:.2f} s", "gain"),
            text(LEFT + block_s * scale + 66, y + BAR + 17, f"{full_s / block_s:.0f} times sooner"),
        ]
    return parts


def picture(data: Mapping[str, Any]) -> str:
    """Return the figure as SVG, from the JSON output of ``benchmarks/efficiency.py ttft``."""
    machine, height = data["machine"], TOP + ROW * len(data["rows"]) + 58
    where = machine["accelerator"] or f"{machine['processor']}, {machine['threads']} threads"
    parts = [
        f'<rect width="{WIDTH}" height="{height}" rx="10" class="card"/>',
        text(24, 34, "Time to the first token of an answer", "head"),
        '<rect x="24" y="50" width="14" height="14" class="full"/>',
        text(44, 62, "full prefill: the model reads all passages again"),
        '<rect x="416" y="50" width="14" height="14" class="block"/>',
        text(436, 62, "their stored keys and values are reused"),
        *rows(data),
        text(
            24,
            height - 38,
            f"Left: tokens of passages, in blocks of {data['block_tokens']}, before a question of "
            f"{data['question_tokens']}. Medians of {data['repeats']} runs.",
            "note",
        ),
        text(
            24,
            height - 18,
            f"Llama of shape {data['model']}, random weights, {data['dtype']}, on {where}.",
            "note",
        ),
    ]
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"  <title>Time to the first token: full prefill against reused blocks</title>\n"
        f"  <style>{STYLE}\n  </style>\n  {body}\n</svg>\n"
    )


def main() -> int:
    FIGURE.write_text(picture(json.loads(RESULTS.read_text("utf-8"))), encoding="utf-8")
    print(FIGURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
