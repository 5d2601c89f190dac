"""What ``blockattn-rag eval --fidelity`` and ``eval --log`` show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from blockattn_rag.app.cli.figures import count, percent
from blockattn_rag.app.cli.output import emit, table

if TYPE_CHECKING:
    from blockattn_rag.lab.evaluation import FidelityReport

_LEGEND = (
    "KL: divergence from full mode's predictions in nats, mean over the answer's tokens, and that",
    "of the first; agree: tokens that the recipe would choose too; same: answers that it would",
    "give too; recovered: how much of the divergence without a recipe (none) is gone. In percent,",
    "95 % intervals. The floor is full attention computed in two steps: what rounding alone does.",
)


def show_fidelity(as_json: bool, title: str, report: FidelityReport) -> None:
    """Print a report: the table and what its columns hold."""
    emit(as_json, report.to_dict(), _table(title, report), *_LEGEND)


def _table(title: str, report: FidelityReport) -> RenderableType:
    columns = ("recipe", "KL (95 %)", "first KL", "agree", "same", "recovered (95 %)")
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
    return table(f"{title}, {count(report.results[0].samples, 'prompt')}", columns, rows)
