"""``blockattn-rag eval``: compare block mode with full mode, by recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from blockattn_rag.app.cli.options import MODEL_HELP, DtypeOption, KVDtypeOption, MaxNewTokensOption
from blockattn_rag.app.cli.output import count, duration, emit, note, percent, table
from blockattn_rag.app.cli.progress import stage_progress, waiting
from blockattn_rag.app.rag.ask import TOP_K
from blockattn_rag.app.rag.database import Database
from blockattn_rag.app.rag.names import check_recipe, existing_model

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.lab.evaluation.accuracy import ModeResult
    from blockattn_rag.lab.evaluation.collection import CollectionReport
    from blockattn_rag.lab.evaluation.fidelity import FidelityReport

_LEGEND = (
    "In percent. accuracy: answers that contain an accepted answer, with a 95 % interval; exact:",
    "answers equal to an accepted answer; F1: word overlap with it; diff: accuracy minus accuracy",
    "of full mode; same: answers equal to full mode's; reused: prompt tokens that were reused.",
)
_FIDELITY_LEGEND = (
    "KL: divergence from full mode's predictions in nats, mean over the answer's tokens; first KL:",
    "at the first token; agree: tokens that the recipe also predicts; same: identical answers;",
    "recovered: share of plain block mode's (none) divergence that the recipe removes. Shares in",
    "percent, 95 % intervals. floor: full attention in two steps, which differs only by rounding.",
)
_DATABASE_LEGEND = (
    "agree: tokens of full mode's answers that a recipe also predicts, in percent; KL: divergence",
    "from full mode's predictions in nats. Intervals are 95 %.",
)
_ANSWERS_LEGEND = (
    "right: answers that contain an accepted answer; kept: full mode's right answers that are also",
    "right here; gain: share of the passages' gain, (right - closed-book) / (full - closed-book).",
)


def evaluate(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP, callback=existing_model)] = None,
    db: Annotated[
        Path | None, typer.Option(help="Database folder, created by `ingest`. Needs --questions.")
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help='Questions for --db, .jsonl or .jsonl.gz, one per line: {"question": "..."}. '
            'With a list "answers", right answers are counted.'
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Questions, .jsonl or .jsonl.gz, one per line: "
            '{"id": "1", "question": "...", "answers": ["..."], '
            '"passages": [{"title": "...", "text": "...", "gold": true}]}'
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Prompts to replay in both modes, .jsonl or .jsonl.gz, one per line: "
            '{"prompt": ["block", "...", "final block"]}'
        ),
    ] = None,
    recipes: Annotated[
        str,
        typer.Option(
            help="Recipes to compare with full mode, comma-separated: auto, settings such as fast, "
            "none or head+recompute:0.1, or a recipe folder."
        ),
    ] = "auto",
    closed_book: Annotated[
        bool, typer.Option("--closed-book", help="Also answer without passages.")
    ] = False,
    max_new_tokens: MaxNewTokensOption = 48,
    output: Annotated[
        Path | None,
        typer.Option(help="JSONL file for all records, from which an interrupted run resumes."),
    ] = None,
    fidelity: Annotated[
        bool,
        typer.Option("--fidelity", help="Compare predictions instead of counting right answers."),
    ] = False,
    kv_dtype: KVDtypeOption = "model",
    dtype: DtypeOption = "auto",
) -> None:
    """Compare block mode with full mode, by right answers or by predictions.

    With --db, full mode, the database's recipe and the recipe fast are compared on your questions.
    The last line recommends a recipe. With --data, questions are answered and scored. With --data
    --fidelity or --log, no labels are needed: each recipe's predictions are compared with full
    mode's at each token of full mode's answers.
    """
    if (db is None) != (questions is None):
        raise typer.BadParameter("--db and --questions must be used together")
    if db is not None and questions is not None:
        others = {"--data": data, "--log": log, "--output": output, "--fidelity": fidelity}
        others |= {"--closed-book": closed_book, "--recipes": recipes != "auto"}
        others |= {"--kv-dtype": kv_dtype != "model", "--dtype": dtype != "auto"}
        if unused := [name for name, value in others.items() if value]:
            raise typer.BadParameter(f"--db cannot be combined with {', '.join(unused)}")
        show_database(db, questions, model, max_new_tokens)
        return
    if model is None:
        raise typer.BadParameter("Expected --model NAME, or --db FOLDER with --questions FILE")
    if (data is None) == (log is None):
        raise typer.BadParameter("Expected either --data FILE or --log FILE")
    if log is not None and closed_book:
        raise typer.BadParameter("--closed-book requires --data")
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.lab.evaluation.accuracy import evaluate as measure_accuracy
    from blockattn_rag.lab.evaluation.datasets import read_samples
    from blockattn_rag.lab.evaluation.fidelity import measure_fidelity, read_log

    names = [name.strip() for name in recipes.split(",") if name.strip()]
    samples = read_samples(data) if data else read_log(log or Path())
    for name in names:
        check_recipe(name)
    with waiting(f"loading {model}"):
        # Without resident blocks, no recipe benefits from another recipe's cached blocks.
        engine: BlockAttentionEngine = BlockAttentionEngine.from_pretrained(
            model, dtype=dtype, kv_dtype=kv_dtype, recipe="none", resident_bytes=0
        )
    file = (data or log or Path()).name
    title = f"{model} on {file}"
    by_answers = data is not None and not fidelity
    with stage_progress("answering" if by_answers else "comparing") as tick:
        measure: Any = measure_accuracy if by_answers else measure_fidelity
        report = measure(
            engine,
            samples,
            names,
            closed_book=closed_book,
            max_new_tokens=max_new_tokens,
            records_path=output,
            settings={"model": model, "data": file},
            on_progress=tick,
        )
    if not by_answers:
        emit(report.to_dict(), fidelity_table(title, report), *_FIDELITY_LEGEND)
        return
    emit(report.to_dict(), accuracy_table(title, report.results), *_LEGEND)
    if rows := ", ".join(f"{r.cut_off} in {r.mode}" for r in report.results if r.cut_off):
        note(
            f"Cut off: {sum(r.cut_off for r in report.results)} of "
            f"{count(len(report.records), 'answer')} ({rows}), after "
            f"{count(max_new_tokens, 'token')} (--max-new-tokens) or at the end of the context "
            "window"
        )


def accuracy_table(title: str, results: Sequence[ModeResult]) -> RenderableType:
    columns = ("recipe", "accuracy (95 %)", "exact", "F1", "diff", "same", "reused")
    rows = []
    for result in results:
        stats = result.stats
        reused = stats.reused_tokens / stats.prompt_tokens if stats.prompt_tokens else None
        rows.append(
            (
                result.mode,
                "{} ({}-{})".format(*map(percent, result.accuracy)),
                percent(result.exact_match.mean),
                percent(result.f1.mean),
                "-" if result.mode == "full" else f"{result.difference.mean * 100:+.1f}",
                percent(result.agreement),
                percent(reused),
            )
        )
    return table(f"{title}, {count(results[0].samples, 'question')}", columns, rows)


def fidelity_table(title: str, report: FidelityReport) -> RenderableType:
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


def show_database(db: Path, questions: Path, model: str | None, max_new_tokens: int) -> None:
    """Compare full mode, the database's recipe and ``"fast"``, and print a recommendation."""
    from blockattn_rag.app.rag.passages import prompt_maker, retriever
    from blockattn_rag.lab.evaluation.collection import Asked, evaluate_collection
    from blockattn_rag.lab.repair.data import read_questions

    with waiting("loading the model"):
        # Blocks are read from the store for each answer, as in a new process.
        database = Database.open(db, model=model, remembers=False)
        database.require_passages()
        prompt = prompt_maker(database)
        asked = [
            Asked(str(number), one.text, prompt(one.text, one.passages), one.answers)
            for number, one in enumerate(read_questions(questions, retriever(database), TOP_K))
        ]
    with stage_progress("comparing") as tick:
        report = evaluate_collection(
            database.engine, asked, max_new_tokens=max_new_tokens, on_progress=tick
        )
    legend: tuple[str, ...] = _DATABASE_LEGEND
    columns = ["", "agree (95 %)", "KL (95 %)", "first token", "times sooner"]
    rows = [
        [
            row.name,
            "-" if row.agreement is None else "{} ({}-{})".format(*map(percent, row.agreement)),
            "-" if row.kl is None else "{:.4f} ({:.4f}-{:.4f})".format(*row.kl),
            duration(row.ttft_s),
            f"{report.sooner(row):.1f}" if row in report.recipes else "-",
        ]
        for row in report.rows
    ]
    if of := report.with_answers:
        legend += _ANSWERS_LEGEND
        columns += ["right", "kept", "gain"]
        for cells, row in zip(rows, report.rows, strict=True):
            cells += [f"{row.right} of {of}", str(row.kept), percent(report.gain(row))]
    title = f"{db} on {questions.name}, {count(report.questions, 'question')}"
    emit(report.to_dict(), table(title, columns, rows), *legend, verdict(report))


def verdict(report: CollectionReport) -> str:
    """Recommend a recipe in one line."""
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
            f"Use mode='full', or create a recipe with `blockattn-rag repair`: {closest.name} "
            f"keeps {percent(report.share(closest))} % of {unit}, less than {percent(TOLERANCE)} "
            f"%{few}."
        )
    return (
        f"Use {row.name}: it keeps {percent(report.share(row))} % of {unit}, and its first token "
        f"comes {report.sooner(row):.1f} times sooner than in full mode{few}."
    )
