"""``blockattn-rag demo``: everything at once, offline, in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockattn_rag.cli.ask import Mode, ModeOption
from blockattn_rag.cli.names import existing_model
from blockattn_rag.cli.output import (
    JsonOption,
    ModelArgument,
    duration,
    emit,
    note,
    size,
    stdout,
    working,
)

if TYPE_CHECKING:
    from blockattn_rag.cli.rag import IngestReport
    from blockattn_rag.demo.run import DemoQuestion, DemoReport


def demo(
    db: Annotated[
        Path | None,
        typer.Option(
            help="Database folder. Default: ~/.cache/blockattn_rag/demo, or "
            "$BLOCKATTN_RAG_HOME/demo."
        ),
    ] = None,
    mode: ModeOption = Mode.block,
    model: Annotated[str, typer.Option(help=ModelArgument, callback=existing_model)] = "bundled",
    as_json: JsonOption = False,
) -> None:
    """Ingest a small encyclopedia and answer questions about it, with and without reuse.

    A second run finds everything stored and computes no passage again.
    """
    with working(as_json):
        from blockattn_rag.demo.run import run_demo

        note("Reading the bundled encyclopedia into Chroma, computing keys and values ...")
        report = run_demo(
            db,
            model=model,
            mode=mode.value,
            on_ingested=None if as_json else _show_ingested,
            on_question=None if as_json else _show_question,
        )
    emit(as_json, report.to_dict(), *_summary(report))


def _show_ingested(report: IngestReport) -> None:
    stdout.print(
        f"{report.passages} passages: {report.computed} computed, {report.reused} reused from "
        f"before ({size(report.stored_bytes)} stored now, {duration(report.total_s)})\n",
        highlight=False,
    )


def _show_question(question: DemoQuestion) -> None:
    mark = "[green]right[/green]" if question.correct else "[red]WRONG[/red]"
    stdout.print(f"[bold]{question.question}[/bold]", highlight=False)
    stdout.print(f"  {question.answer}", highlight=False, markup=False)
    stdout.print(f"  {mark} (expected: {question.expected})", highlight=False)
    stdout.print(
        f"  from: {', '.join(question.sources)}; blocks reused {question.hits}, computed "
        f"{question.misses}; first token {duration(question.ttft_block_s)} in block mode, "
        f"{duration(question.ttft_full_s)} in full mode\n",
        highlight=False,
        markup=False,
    )


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
        f"Database: {report.db}",
    ]
