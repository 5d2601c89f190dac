"""``blockattn-rag demo``: everything at once, offline, in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from blockattn_rag.cli.addresses import whole_store
from blockattn_rag.cli.ask import ModeOption
from blockattn_rag.cli.figures import count, duration, size
from blockattn_rag.cli.output import JsonOption, ModelArgument, emit, note, plain, stdout, working
from blockattn_rag.demo.run import DemoQuestion, DemoReport, run_demo
from blockattn_rag.rag.ingest import IngestReport
from blockattn_rag.rag.model_names import existing_model


def demo(
    db: Annotated[
        Path | None,
        typer.Option(
            help="Database folder. Default: ~/.cache/blockattn_rag/demo, or "
            "$BLOCKATTN_RAG_HOME/demo."
        ),
    ] = None,
    mode: ModeOption = "block",
    model: Annotated[str, typer.Option(help=ModelArgument, callback=existing_model)] = "bundled",
    store: Annotated[
        str | None,
        typer.Option(
            help="Where keys and values go: a folder, s3://bucket/kv, redis://host/0 or memory:. "
            "Default: the folder kv of the database.",
            callback=whole_store,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ingest a small encyclopedia and answer questions about it, with and without reuse.

    A second run finds everything stored and computes no passage again.
    """
    with working(as_json):
        note("Reading the bundled encyclopedia into Chroma, computing keys and values ...")
        show: dict[str, Any] = {"on_ingested": _show_ingested, "on_question": _show_question}
        report = run_demo(db, model=model, mode=mode, store=store, **({} if as_json else show))
    emit(as_json, report.to_dict(), *_summary(report))


def _show_ingested(report: IngestReport) -> None:
    stdout.print(
        f"{count(report.passages, 'passage')}: {report.computed} computed, {report.reused} reused "
        f"from before ({size(report.stored_bytes)} stored now, {duration(report.total_s)})\n",
        highlight=False,
    )


def _show_question(question: DemoQuestion) -> None:
    stats = question.block.stats
    mark = "[green]right[/green]" if question.correct else "[red]WRONG[/red]"
    cut = " ... [cut off by the demo's limit]" if question.shown.finish_reason == "length" else ""
    for line in (
        f"[bold]{_text(question.asked.question)}[/bold]",
        f"  {_text(question.shown.answer + cut)}",
        f"  {mark} (expected: {_text(question.asked.expected)})",
        f"  from: {_text(', '.join(question.sources))}; blocks reused {stats.hits}, "
        f"computed {stats.misses}; first token {duration(stats.ttft_s)} in block mode, "
        f"{duration(question.full.stats.ttft_s)} in full mode\n",
    ):
        stdout.print(line, highlight=False)


def _text(text: str) -> str:
    """A text that others wrote, for a line with markup."""
    return escape(plain(text))


def _summary(report: DemoReport) -> list[str]:
    total = report.summary
    prompt_tokens = total["reused_tokens"] + total["computed_tokens"]
    return [
        f"{total['right']} of {total['of']} right in {report.mode} mode. Blocks: {total['hits']} "
        f"reused, {total['misses']} computed; {total['reused_tokens']} of {prompt_tokens} prompt "
        "tokens reused.",
        f"First token, median: {duration(total['ttft_block_median_s'])} in block mode, "
        f"{duration(total['ttft_full_median_s'])} in full mode ({total['speedup']:.1f} times).",
        "The bundled model is tiny, and so is the difference: `blockattn-rag bench ttft` shows it "
        "at the size of models that people use.",
        f"Database: {report.db}; keys and values: {report.store}",
    ]
