"""Report of a repair: JSON in the recipe, four lines of text, and a plot."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping
from typing import Any

from blockattn_rag.engine.outline import FREE_SINK
from blockattn_rag.lab.evaluation.metrics import Interval
from blockattn_rag.lab.evaluation.records import PLAIN
from blockattn_rag.lab.repair.plan import LIMITS
from blockattn_rag.lab.training.report import draw_losses
from blockattn_rag.lazy import missing_extra

logger = logging.getLogger("blockattn_rag")

RepairReport = Mapping[str, Any]
"""Result of a repair, as plain JSON types:

- ``model``, ``fingerprint``, ``version``, ``date``: model, package version, and date in UTC.
- ``chosen``: name of the chosen candidate.
- ``tolerance``: fraction of full mode's answers to keep; ``shares``: the fraction that each
  candidate of the second step (``repair.compare``) keeps, the cheapest first.
- ``candidates``: all candidates, the simplest first, each with its ``name``, its mean ``loss`` on
  the questions for choosing, and its ``FidelityResult`` on the questions for measuring.
- ``passages``: number of passages in the measured prompts.
- ``questions``: number of distinct questions; ``written``: whether the model generated them.
- ``chosen_on``, ``measured_on``: numbers of questions for choosing and for measuring.
- ``right``: numbers of correct answers in full mode, plain block mode and with the recipe, on the
  ``answered`` questions with reference answers. Empty if there are none.
- ``plan``: see ``RepairPlan``; ``curve``: training losses; ``seconds``: seconds by stage.
"""


def figures(report: RepairReport) -> list[str]:
    by_name = {candidate["name"]: candidate for candidate in report["candidates"]}
    plain, chosen = by_name[PLAIN], by_name[report["chosen"]]
    recovered = ""
    if chosen["recovery"] is not None:
        mean, low, high = (_percent(chosen["recovery"][end]) for end in ("mean", "low", "high"))
        recovered = f": {mean} recovered ({low} to {high})"
    right = "not measured, because the questions have no reference answers"
    if report["right"]:
        counts = ", ".join(f"{name} {count}" for name, count in report["right"].items())
        right = f"{counts} of {report['answered']}"
    agreement, identical = (
        f"{_percent(plain[name]['mean'])} -> {_percent(chosen[name]['mean'])}"
        for name in ("agreement", "identical")
    )
    kept = ", ".join(f"{name} {_percent(share)}" for name, share in report["shares"].items())
    return [
        f"Target: keep {_percent(report['tolerance'])} of full mode's answers. Kept: {kept}.",
        f"Divergence from full mode (KL), {report['measured_on']} held-out questions: "
        f"{plain['kl']['mean']:.3f} without a recipe, {chosen['kl']['mean']:.3f} with "
        f"it{recovered}.{_shortfall(report)}",
        f"Token agreement with full mode: {agreement}; identical answers: {identical}.",
        f"Right answers: {right}.",
    ]


def _shortfall(report: RepairReport) -> str:
    """Sentences about too few questions or an untrained adapter. Empty if neither applies."""
    losses = {candidate["name"]: candidate["loss"] for candidate in report["candidates"]}
    if (closed := losses.get(f"{FREE_SINK} + closed form")) is None:
        least = math.ceil(2 * LIMITS.fewest_to_choose / LIMITS.held_out_share)
        lacks = (
            f"No adapter was fitted, which takes at least {least} questions, and time to compare"
        )
    elif closed < losses[FREE_SINK] and not report["plan"]["samples"]:
        lacks = "There was no time to train the adapter"
    else:
        return ""
    return f" {lacks}. Increase --minutes and add --questions."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def plot(report: RepairReport) -> bytes | None:
    """Plot the divergence of all candidates and the training losses, as PNG. None without
    matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            "Plot skipped, because it requires %s.", missing_extra("matplotlib", "train")
        )
        return None
    figure = Figure(figsize=(11.0, 4.0), layout="constrained")
    bars, curve = figure.subplots(1, 2)
    names = [candidate["name"] for candidate in report["candidates"]]
    divergences = [Interval(**candidate["kl"]) for candidate in report["candidates"]]
    errors = [[kl.mean - kl.low for kl in divergences], [kl.high - kl.mean for kl in divergences]]
    colors = ["tab:green" if name == report["chosen"] else "tab:blue" for name in names]
    bars.barh(names, [kl.mean for kl in divergences], xerr=errors, color=colors, capsize=3)
    bars.invert_yaxis()
    bars.set(
        xlabel="KL from full mode, 95 % intervals",
        title=f"{report['measured_on']} held-out questions, {report['passages']} passages",
    )
    draw_losses(curve, report["curve"])
    curve.set(title="training of the adapter")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()
