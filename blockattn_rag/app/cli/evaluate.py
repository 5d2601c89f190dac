"""``blockattn-rag eval``: what block mode costs in accuracy, by recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from blockattn_rag.app.cli.fidelity import show_fidelity
from blockattn_rag.app.cli.figures import count, duration, percent
from blockattn_rag.app.cli.output import (
    JsonOption,
    KVDtypeHelp,
    KVDtypeName,
    ModelArgument,
    emit,
    note,
    progress,
    table,
    waiting,
    working,
)
from blockattn_rag.app.rag.model_names import check_recipe, existing_model, loading

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.lab.evaluation import EvaluationReport, ModeResult


def evaluate(
    model: Annotated[str, typer.Option(help=ModelArgument, callback=existing_model)],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Questions, .jsonl or .jsonl.gz; a line: "
            '{"id": "1", "question": "...", "answers": ["..."], '
            '"passages": [{"title": "...", "text": "...", "gold": true}]}'
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Prompts to replay in both modes, without right answers, .jsonl or .jsonl.gz; a "
            'line: {"prompt": ["block", "...", "final block"]}'
        ),
    ] = None,
    recipes: Annotated[
        str,
        typer.Option(
            help="Recipes to compare with full mode: auto, none, a sink such as head:4, or the "
            "folder of a recipe; commas between."
        ),
    ] = "auto",
    closed_book: Annotated[
        bool, typer.Option("--closed-book", help="Also answer without passages.")
    ] = False,
    prompt_format: Annotated[
        str,
        typer.Option(
            help="auto (a known checkpoint's own, else chat), chat (the model's own template), "
            "block-attention, turborag, tulu3-block, llama3-block or kvlink."
        ),
    ] = "auto",
    num_passages: Annotated[
        int | None, typer.Option(min=1, help="Passages a question, the gold ones among them.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first questions or prompts.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 48,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Questions answered at once; 1 shows times to first token.")
    ] = 8,
    output: Annotated[
        Path | None,
        typer.Option(help="Keep every record in this JSONL file; a stopped run resumes from it."),
    ] = None,
    fidelity: Annotated[
        bool,
        typer.Option(
            "--fidelity",
            help="Compare predictions with full mode's along full mode's answer. Right answers are "
            "not used.",
        ),
    ] = False,
    kv_dtype: Annotated[KVDtypeName, typer.Option(help=KVDtypeHelp)] = "model",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare block mode with full mode, by recipe: right answers, or predictions.

    With --data, questions are answered and scored. With --data --fidelity or with --log, every
    recipe's predictions are compared with full mode's along full mode's answers.
    """
    if (data is None) == (log is None):
        raise typer.BadParameter("expected --data FILE or --log FILE, and not both")
    if log is not None and (given := _only_with_data(closed_book, num_passages, prompt_format)):
        raise typer.BadParameter(f"{given} is for --data; leave it out with --log")
    with working(as_json):
        from blockattn_rag.engine.engine import BlockAttentionEngine
        from blockattn_rag.lab import evaluation

        names = [name.strip() for name in recipes.split(",") if name.strip()]
        if log is not None:
            prompts = evaluation.read_log(log, limit=limit)
        elif data is not None:
            samples = evaluation.read_samples(data, limit=limit)
        for name in names:
            check_recipe(name)
        with waiting(f"loading {model}"), loading(model):
            # Each row computes its own answers: no tails of another row's (engine.tails).
            engine: BlockAttentionEngine = BlockAttentionEngine.from_pretrained(
                model, device=device, dtype=dtype, kv_dtype=kv_dtype, recipe="none",
                resident_bytes=0,
            )  # fmt: skip
        common: dict[str, Any] = {"max_new_tokens": max_new_tokens, "records_path": output}
        compared = report = None
        with progress("answering" if data and not fidelity else "comparing") as tick:
            common["on_progress"] = tick
            if log is not None:
                compared = evaluation.replay(engine, prompts, names, **common)
            elif data is not None:
                common |= {
                    "closed_book": closed_book,
                    "prompt": prompt_format,
                    "num_passages": num_passages,
                    "settings": {"model": model, "data": data.name},
                }
                if fidelity:
                    compared = evaluation.measure_fidelity(engine, samples, names, **common)
                else:
                    report = evaluation.evaluate(
                        engine, samples, names, **common, batch_size=batch_size
                    )
    title = f"{model} on {(data or log or Path()).name}"
    if compared:
        show_fidelity(as_json, title, compared)
    if report:
        _show(as_json, title, report, max_new_tokens)


def _only_with_data(closed_book: bool, num_passages: int | None, prompt_format: str) -> str:
    """The first option given that makes prompts of data; empty if there is none."""
    if closed_book:
        return "--closed-book"
    if num_passages is not None:
        return "--num-passages"
    return "--prompt-format" if prompt_format != "auto" else ""


def _show(as_json: bool, title: str, report: EvaluationReport, max_new_tokens: int) -> None:
    tables = [_table(title, report.results)]
    tables += [_table(f"of these: {kind}", rows) for kind, rows in report.by_kind.items()]
    emit(as_json, report.to_dict(), *tables, *_legend(report.results))
    if report.cut_off:
        _note_cut_off(report, max_new_tokens)


def _note_cut_off(report: EvaluationReport, max_new_tokens: int) -> None:
    rows = ", ".join(f"{r.cut_off} in {r.mode}" for r in report.results if r.cut_off)
    note(
        f"cut off: {report.cut_off} of {count(len(report.records), 'answer')} ({rows}), after "
        f"{count(max_new_tokens, 'token')} (--max-new-tokens) or where the context window "
        "ended, maybe before what was asked"
    )


def _legend(results: list[ModeResult]) -> list[str]:
    """What the columns hold."""
    return [
        "In percent. accuracy: an answer occurs in the output, and where its mean lies (95 %);",
        "exact: the output is one; F1: words shared with an answer; diff: accuracy less that of",
        "full mode; same: outputs equal to those of full mode; reused: prompt tokens whose keys",
        "and values were found.",
        "TTFT: time to the first token, median."
        if _are_timed(results)
        else "Times are reported with --batch-size 1: in a batch, all wait for the whole batch.",
    ]


def _are_timed(results: list[ModeResult]) -> bool:
    return all(result.ttft_s is not None for result in results)


def _table(title: str, results: list[ModeResult]) -> RenderableType:
    times = ("TTFT",) if _are_timed(results) else ()
    columns = ("recipe", "accuracy (95 %)", "exact", "F1", "diff", "same", *times, "reused")
    rows = [_row(result) for result in results]
    return table(f"{title}, {count(results[0].samples, 'question')}", columns, rows)


def _row(result: ModeResult) -> tuple[str, ...]:
    stats = result.stats
    mean, low, high = result.accuracy
    return (
        result.mode,
        f"{percent(mean)} ({percent(low)}-{percent(high)})",
        percent(result.exact_match.mean),
        percent(result.f1.mean),
        "-" if result.mode == "full" else f"{result.difference.mean * 100:+.1f}",
        percent(result.agreement),
        *(() if result.ttft_s is None else (duration(result.ttft_s),)),
        percent(stats.reused_tokens / stats.prompt_tokens if stats.prompt_tokens else None),
    )
