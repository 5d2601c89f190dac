"""Plot the results of ``benchmarks/efficiency.py``.

    python benchmarks/plot.py benchmarks/results/ttft-long.json docs/figures/ttft-long.svg

The first word of the file name selects the plot. The script needs matplotlib (extra ``train``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LABELS = {
    "full": "full prefill",
    "copy": "blocks, copied",
    "relay": "blocks, relay",
    "floor": "floor (question alone)",
    "shared": "shared (relay)",
    "unshared": "unshared (copy)",
    "encode": "encoding blocks",
    "plain": "plain forward",
}
AXES = {
    "length": "tokens of context",
    "block_tokens": "tokens of a block",
    "batch": "requests",
    "system_tokens": "tokens of the system prompt",
    "s": "seconds",
    "tokens_per_s": "tokens per second",
    "peak_bytes": "bytes",
}
KINDS: Mapping[str, tuple[str, str, str | None]] = {
    "ttft": ("length", "s", None),
    "decode": ("length", "s", "block_tokens"),
    "batch": ("batch", "s", None),
    "memory": ("length", "peak_bytes", None),
    "shared": ("batch", "tokens_per_s", "system_tokens"),
    "ingest": ("block_tokens", "tokens_per_s", None),
}
"""By benchmark: the horizontal axis, the unit, and the field whose values get separate lines."""


def plot(measured: str, rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Plot the rows of a benchmark, with one line per path.

    Args:
        measured: Name of the benchmark, a key of ``KINDS``.
        rows: Rows of the benchmark.
        file: File to write. The extension determines the format.
    """
    from matplotlib.figure import Figure

    x, unit, series = KINDS[measured]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for value in dict.fromkeys(row[series] for row in rows) if series else [None]:
        chosen = [row for row in rows if series is None or row[series] == value]
        for path in LABELS:
            if f"{path}_{unit}" not in chosen[0]:
                continue
            label = LABELS[path] if series is None else f"{LABELS[path]}, {value} {AXES[series]}"
            heights = [row[f"{path}_{unit}"] for row in chosen]
            axes.plot([row[x] for row in chosen], heights, marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel=AXES[x], ylabel=AXES[unit])
    places = sorted({row[x] for row in rows})
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.set_xticks([], minor=True)
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(file)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    plot(source.stem.split("-")[0], json.loads(source.read_text("utf-8"))["rows"], target)
