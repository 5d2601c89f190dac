"""What ``blockattn-rag eval --fidelity`` and ``--diagnosis`` show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from blockattn_rag.cli.figures import count, percent
from blockattn_rag.cli.output import emit, table

if TYPE_CHECKING:
    from blockattn_rag.evaluation import FidelityReport

_LEGEND = (
    "KL: divergence from full mode's predictions in nats, mean over the answer's tokens, and that",
    "of the first; agree: tokens that the mode would choose too; same: answers that it would give",
    "too; recovered: how much of block mode's divergence is gone. In percent, 95 % intervals. The",
    "floor is full attention computed in two steps: what rounding alone does.",
)
_PARTS_LEGEND = (
    "Rows: block mode, in which full mode's keys or values of passages were swapped in: all keys,",
    "all values, both of the first tokens of each passage, both of the layers named (the first is",
    "0), and all (floor). What a repair of that part alone can hope for; no strict bound.",
)


def show_fidelity(
    as_json: bool, title: str, report: FidelityReport, *, diagnosis: bool = False
) -> None:
    """Print a report: the table and what its columns hold, and of a diagnosis its rows."""
    legend = (*_LEGEND, *_PARTS_LEGEND) if diagnosis else _LEGEND
    emit(as_json, report.to_dict(), _table(title, report, diagnosis), *legend)


def _table(title: str, report: FidelityReport, diagnosis: bool) -> RenderableType:
    name = "full mode's" if diagnosis else "mode"
    columns = (name, "KL (95 %)", "first KL", "agree", "same", "recovered (95 %)")
    rows = [
        (
            row.mode,
            f"{row.kl.mean:.4f} ({row.kl.low:.4f}-{row.kl.high:.4f})",
            f"{row.first_kl.mean:.4f}",
            percent(row.agreement.mean),
            percent(row.identical.mean),
            "-" if row.recovery is None else "{} ({} to {})".format(*map(percent, row.recovery)),
        )
        for row in report.results
    ]
    questions = count(report.results[0].samples, "question")
    return table(f"{title}, {questions}", columns, rows)
