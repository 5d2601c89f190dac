"""``blockattn-rag eval --db``: a database's recipe compared with full mode on real questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from blockattn_rag.app.cli.output import count, duration, emit, percent, table
from blockattn_rag.app.cli.progress import stage_progress, waiting
from blockattn_rag.app.rag.ask import TOP_K
from blockattn_rag.app.rag.database import Database

if TYPE_CHECKING:
    from blockattn_rag.lab.evaluation.collection import Asked, CollectionReport, CollectionRow
    from blockattn_rag.lab.repair.data import Question

_LEGEND = (
    "agree: tokens of full mode's answers that a recipe also predicts, in percent; KL: divergence",
    "from full mode's predictions in nats. Intervals are 95 %.",
)
_ANSWERS_LEGEND = (
    "right: answers that contain an accepted answer; kept: full mode's right answers that stay",
    "right; gain: share of the gain from passages, (right - closed-book) / (full - closed-book).",
)


def show_database(db: Path, questions: Path, model: str | None, max_new_tokens: int) -> None:
    """Compare full mode, the database's recipe and ``"fast"``, and print the verdict."""
    from blockattn_rag.lab.evaluation.collection import evaluate_collection

    with waiting("loading the model"):
        # Blocks are read from the store for each answer, as in a new process.
        database = Database.open(db, model=model, remembers=False)
        database.require_passages()
        asked = _asked(database, questions)
    with stage_progress("Comparing") as tick:
        report = evaluate_collection(
            database.engine, asked, max_new_tokens=max_new_tokens, on_progress=tick
        )
    legend = _LEGEND + (_ANSWERS_LEGEND if report.with_answers else ())
    emit(report.to_dict(), _table(f"{db} on {questions.name}", report), *legend, verdict(report))


def _asked(database: Database, questions: Path) -> list[Asked]:
    from blockattn_rag.app.rag.passages import prompt_maker, retriever
    from blockattn_rag.lab.evaluation.collection import Asked
    from blockattn_rag.lab.repair.data import read_questions
    from blockattn_rag.prompts.formats import Passage

    find, prompt = retriever(database), prompt_maker(database)

    def nearest(text: str, number: int) -> list[Passage]:
        return [Passage("", found) for found in find(text, number)]

    def asked(number: int, one: Question) -> Asked:
        texts = [f"{passage.title}\n{passage.text}".strip() for passage in one.passages]
        return Asked(str(number), one.text, prompt(one.text, texts), one.answers)

    return [asked(*each) for each in enumerate(read_questions(questions, nearest, TOP_K))]


def _table(title: str, report: CollectionReport) -> RenderableType:
    columns = ["", "agree (95 %)", "KL (95 %)", "first token", "times sooner"]
    columns += ["right", "kept", "gain"] * bool(report.with_answers)
    rows = [_row(row, report) for row in report.rows]
    return table(f"{title}, {count(report.questions, 'question')}", columns, rows)


def _row(row: CollectionRow, report: CollectionReport) -> list[str]:
    is_recipe = row in report.recipes
    cells = [
        row.name,
        "-" if row.agreement is None else "{} ({}-{})".format(*map(percent, row.agreement)),
        "-" if row.kl is None else "{:.4f} ({:.4f}-{:.4f})".format(*row.kl),
        duration(row.ttft_s),
        f"{report.sooner(row):.1f}" if is_recipe else "-",
    ]
    if report.with_answers:
        cells += [f"{row.right} of {report.with_answers}", str(row.kept), percent(report.gain(row))]
    return cells


def verdict(report: CollectionReport) -> str:
    """One line that says which recipe to use."""
    from blockattn_rag.lab.evaluation.collection import FEWEST, TOLERANCE

    row = report.best
    by_answers = bool(report.with_answers and report["full"].right)
    unit = "full mode's right answers" if by_answers else "the tokens of full mode's answers"
    few = ""
    if report.questions < FEWEST:
        few = f" ({count(report.questions, 'question')}: too few to rely on)"
    if row is None:
        closest = max(report.recipes, key=report.share)
        return (
            f"Use mode='full', or make a recipe with `blockattn-rag repair`: {closest.name} keeps "
            f"{percent(report.share(closest))} % of {unit}, less than {percent(TOLERANCE)} %{few}."
        )
    return (
        f"Use {row.name}: it keeps {percent(report.share(row))} % of {unit}, and its first token "
        f"comes {report.sooner(row):.1f} times sooner than in full mode{few}."
    )
