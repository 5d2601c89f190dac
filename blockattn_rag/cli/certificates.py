"""What ``blockattn-rag calibrate`` shows: the settings compared, and the certificate."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from blockattn_rag.cli.figures import count, percent
from blockattn_rag.cli.output import emit, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from blockattn_rag.engine.results import Certificate
    from blockattn_rag.evaluation.calibration.run import CalibrationReport

_SHOWN = 8
_LEGEND = (
    "loss: divergence from full mode in nats per token, the first token counted twice; KL: each",
    "counted once; agree: tokens that block mode would choose too; same: whole answers; recovered:",
    "how much of plain block mode's divergence is gone. In percent, with 95 % intervals.",
)


def show_calibration(
    as_json: bool, report: CalibrationReport, path: Path, db: Path, model: str
) -> None:
    """Print a report that was written to ``path``, of a model over the database ``db``."""
    made = report.calibration
    emit(
        as_json,
        {**report.to_dict(), "path": path},
        _finalists(report),
        _certificates(report),
        *_LEGEND,
        f"Chosen: {report.choice.setting.mode}, the simplest within one standard error of the "
        f"best (in {percent(made.stability)} % of resamples). Written to {path}.",
        "It reaches the targets." if made.qualified else _next_steps(report, db, model),
    )


def _finalists(report: CalibrationReport) -> RenderableType:
    """The best settings, the chosen one, and plain block mode."""
    made, chosen = report.calibration, report.choice.setting.mode
    rows = [
        (one.mode, f"{loss:.4f}", f"{error:.4f}")
        for rank, (one, loss, error) in enumerate(report.finalists)
        if rank < _SHOWN or one.mode in (chosen, "block")
    ]
    title = (
        f"Compared: {made.compared} settings, {len(report.finalists)} of them on all "
        f"{count(made.chosen_on, 'question')}. The best:"
    )
    return table(title, ("setting", "loss", "standard error"), rows)


def _certificates(report: CalibrationReport) -> RenderableType:
    chosen = report.choice.setting.mode
    found = [("block", one) for one in report.plain] if chosen != "block" else []
    found += [(chosen, one) for one in report.calibration.certificates]
    found.sort(key=lambda row: row[1].passages)
    columns = ("setting", "passages", "KL", "agree", "same", "recovered", "questions")
    rows = [(mode, *_row(one)) for mode, one in found]
    kept = report.calibration.kv_dtype
    blocks = "" if kept == "model" else f", blocks in {kept}"
    return table(f"Certified on other questions{blocks}:", columns, rows)


def _row(one: Certificate) -> tuple[Any, ...]:
    def shares(*figures: float | None) -> str:
        return "-" if None in figures else "{} ({} to {})".format(*map(percent, figures))

    return (
        one.passages,
        f"{one.kl:.4f} ({one.kl_low:.4f} to {one.kl_high:.4f})",
        shares(one.agreement, one.agreement_low, one.agreement_high),
        shares(one.identical, one.identical_low, one.identical_high),
        shares(one.recovery, one.recovery_low, one.recovery_high),
        one.questions,
    )


def _next_steps(report: CalibrationReport, db: Path, model: str) -> str:
    from blockattn_rag.engine.calibration import PLAIN_SETTINGS

    made, chosen = report.calibration, report.choice.setting.options
    told = f"It does not qualify: {made.reason}."
    if any(one.seen for one in made.certificates):
        return told
    # A reader repairs what is left, so it is trained on what was chosen.
    names = [name for name in ("sink", "correction") if chosen[name] != PLAIN_SETTINGS[name]]
    names += ["merge"] if "merge" in made.digests else []
    based = "".join(f" --{name} {quote(chosen[name])}" for name in names)
    files = "".join(f" --{name} {quote(chosen[name])}" for name in names if name != "sink")
    steps = [
        f"promote more passages (`--promote {_promoted(report) + 2}`)",
        f"train a reader (`blockattn-rag adapt --model {model} --passages {db}{based} --output "
        f"READER`) and calibrate with it (`--reader READER{files}`)",
        "or answer in full mode (mode='full', `ask --mode full`)",
    ]
    return f"{told} Next: {', '.join(steps)}."


def _promoted(report: CalibrationReport) -> int:
    """The most passages that a setting promoted."""
    return max(one.cost[0] for one, *_ in report.finalists)
