"""Plots benchmark rows, with a line for each path. Needs matplotlib (extra ``train``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockattn_rag.lazy import missing_extra

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


def new_figure() -> Any:
    """An empty matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need {missing_extra('matplotlib', 'train')}") from error
    return Figure(figsize=(6.4, 4.0), layout="constrained")


def plot(
    rows: Sequence[Mapping[str, Any]], file: Path, *, x: str, unit: str, series: str | None = None
) -> None:
    """Plot ``<path>_<unit>`` over ``x``.

    Args:
        rows: Rows of a benchmark.
        file: File to write. Its extension determines the format.
        x: Field of the horizontal axis.
        unit: ``"s"``, ``"tokens_per_s"`` or ``"peak_bytes"``.
        series: Field whose values get separate lines.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure()
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
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file)
