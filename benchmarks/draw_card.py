"""Draw the preview image for links to the documentation, from results/ttft-float32.json.

python benchmarks/draw_card.py    # writes docs/figures/card.png, 1200 x 630 pixels
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/ttft-float32.json"
CARD = ROOT / "docs/figures/card.png"
TITLE = "blockattn_rag"
TAGLINE = "Local RAG that reads each passage once"


def lines(measured: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of the two bars: the longest prompt in full mode and with reused blocks."""
    row = max(measured["rows"], key=lambda row: int(row["length"]))
    shape = f"{measured['model'].upper()} shape on two CPU cores"
    return (
        f"full prefill of {row['length']:,} tokens: {row['full_s']:.1f} s ({shape})",
        f"with reused blocks: {min(row['relay_s'], row['copy_s']):.2f} s",
    )


def draw(measured: Mapping[str, Any], path: Path) -> None:
    """Write the image. Its metadata contains the text of the bars, so that tests can check it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    row = max(measured["rows"], key=lambda row: int(row["length"]))
    full, block = lines(measured)
    share = min(row["relay_s"], row["copy_s"]) / row["full_s"]
    figure = Figure(figsize=(12, 6.3), dpi=100, facecolor="#ffffff")
    figure.text(0.07, 0.80, TITLE, fontsize=54, fontweight="bold", color="#1f2328")
    figure.text(0.07, 0.68, TAGLINE, fontsize=28, color="#59636e")
    for height, text, width, color in (
        (0.40, full, 1.0, "#b5bcc6"),
        (0.14, block, share, "#0b7a75"),
    ):
        figure.text(0.07, height + 0.10, text, fontsize=22, color="#1f2328")
        figure.add_artist(Rectangle((0.07, height), 0.86 * width, 0.07, color=color))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Description": f"{full}; {block}", "Software": None})


if __name__ == "__main__":
    draw(json.loads(RESULTS.read_text("utf-8")), CARD)
