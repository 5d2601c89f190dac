"""A plot of a diagnosis. Needs matplotlib (extra ``train``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockattn_rag.evaluation.fidelity import FLOOR, FidelityReport, FidelityResult
from blockattn_rag.lazy import missing_extra

_WITHIN = ("keys ", "values ", "first-16 ")
"""How the names of parts begin that lie within a slice of the layers."""


def plot_diagnosis(report: FidelityReport, file: Path) -> None:
    """Draw the divergence that is left after each part was swapped in, with its interval.

    On the left a bar for each part of all layers; in the middle lines over the layer up to which,
    or from which on, all was swapped in; on the right lines over the layers in which alone keys,
    values or the first tokens' were.

    Args:
        report: of :func:`blockattn_rag.evaluation.diagnosis.diagnose`.
        file: where to; its ending tells the format.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need {missing_extra('matplotlib', 'train')}") from error
    figure = Figure(figsize=(14.0, 4.0), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    by_layer = ("layers", *_WITHIN)
    _bars(left, [row for row in report.results if not row.mode.startswith(by_layer)])
    _cumulative(middle, report)
    _slices(right, report)
    figure.savefig(file, dpi=120)


def _bars(axes: Any, rows: list[FidelityResult]) -> None:
    """Bars that are much longer than block mode's are cut off; their figures stand beside them."""
    names = {"block": "nothing (block mode)", FLOOR: "all (floor)"}
    labels = [f"{names.get(row.mode, row.mode)}: {row.kl.mean:.4f}" for row in rows]
    axes.barh(labels, [row.kl.mean for row in rows], xerr=_errors(rows), capsize=2)
    block = next(row for row in rows if row.mode == "block")
    axes.set_xlim(0, 1.05 * min(2 * block.kl.high, max(row.kl.high for row in rows)))
    axes.invert_yaxis()
    axes.set(xlabel="KL from full mode (nats)", title="Full mode's keys and values of ...")
    axes.grid(axis="x", alpha=0.3)


def _cumulative(axes: Any, report: FidelityReport) -> None:
    """Each line ends in block mode at one side and in the floor at the other."""
    layers, block, floor = report.settings["num_layers"], report["block"], report[FLOOR]
    for sign, label, at_0, at_end in (
        ("<", "of the layers before", block, floor),
        (">=", "of the layers from there on", floor, block),
    ):
        start = f"layers{sign}"
        cut = {
            int(row.mode.removeprefix(start)): row
            for row in report.results
            if row.mode.startswith(start)
        }
        points = {0: at_0, **cut, layers: at_end}
        rows = list(points.values())
        heights = [row.kl.mean for row in rows]
        axes.errorbar(list(points), heights, yerr=_errors(rows), marker="o", label=label, capsize=2)
    axes.set(xlabel=f"layer (of {layers})", ylabel="KL from full mode (nats)")
    axes.set_title("... and by layer")
    _finish(axes)


def _slices(axes: Any, report: FidelityReport) -> None:
    """A line for each kind of part that was swapped in within a slice of the layers; the dashed one
    is block mode."""
    for kind in _WITHIN:
        rows = [row for row in report.results if row.mode.startswith(kind)]
        ends = [row.mode.removeprefix(kind).split("-") for row in rows]
        middles = [(int(first) + int(last)) / 2 for first, last in ends]
        heights = [row.kl.mean for row in rows]
        label = f"{kind.strip()} of the layers there"
        axes.errorbar(middles, heights, yerr=_errors(rows), marker="o", label=label, capsize=2)
    axes.axhline(report["block"].kl.mean, color="grey", linestyle="--", label="nothing")
    axes.set(xlabel="layer", ylabel="KL from full mode (nats)", title="... and within few layers")
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for the legend
    axes.legend()
    axes.grid(alpha=0.3)


def _errors(rows: list[FidelityResult]) -> list[list[float]]:
    """What lies below and above the means in their intervals."""
    below = [max(0.0, row.kl.mean - row.kl.low) for row in rows]
    return [below, [max(0.0, row.kl.high - row.kl.mean) for row in rows]]
