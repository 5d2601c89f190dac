"""The demo: the bundled encyclopedia in Chroma, questions through a LlamaIndex query engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from blockattn_rag.demo.corpus import Question, bundled_corpus, bundled_questions, is_correct
from blockattn_rag.engine.results import Mode, ReuseStats
from blockattn_rag.files.folders import state_folder
from blockattn_rag.rag.ask import Answer, Assistant
from blockattn_rag.rag.database import Database, Manifest
from blockattn_rag.rag.documents import set_source
from blockattn_rag.rag.ingest import IngestReport, ingest_documents

if TYPE_CHECKING:
    from llama_index.core.schema import Document

SOURCE = "bundled encyclopedia"
TOP_K = 5
MAX_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """A question and its answers: that in block mode, that in full mode, and which is ``shown``."""

    asked: Question
    block: Answer
    full: Answer
    shown: Answer

    @property
    def correct(self) -> bool:
        """Whether the shown answer is right."""
        return is_correct(self.asked, self.shown.answer)

    @property
    def sources(self) -> list[str]:
        """Titles of the passages behind the shown answer."""
        return [source.title for source in self.shown.sources]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; times in seconds. ``hits`` and the like are of block mode."""
        return {
            "question": self.asked.question,
            "answer": self.shown.answer,
            "expected": self.asked.expected,
            "correct": self.correct,
            "sources": self.sources,
            **self.block.stats.reuse(),
            "ttft_block_s": self.block.stats.ttft_s,
            "ttft_full_s": self.full.stats.ttft_s,
            "finish_reason": self.shown.finish_reason,
        }


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The whole demo. ``mode`` is the mode whose answers are shown and judged; ``store``: the
    folder or address of the keys and values."""

    db: str
    store: str
    model: str
    mode: Mode
    ingest: IngestReport
    questions: tuple[DemoQuestion, ...]

    @property
    def summary(self) -> dict[str, Any]:
        """Totals, and medians of the times."""
        block = statistics.median(q.block.stats.ttft_s for q in self.questions)
        full = statistics.median(q.full.stats.ttft_s for q in self.questions)
        return {
            "right": sum(q.correct for q in self.questions),
            "of": len(self.questions),
            **sum((q.block.stats for q in self.questions), ReuseStats("block")).reuse(),
            "ttft_block_median_s": block,
            "ttft_full_median_s": full,
            "speedup": full / block if block else 0.0,
        }

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        questions = [question.to_dict() for question in self.questions]
        return {**asdict(self), "questions": questions, "summary": self.summary}


def default_folder() -> Path:
    """Where the demo keeps its database; see ``folders.state_folder``."""
    return state_folder() / "demo"


def documents() -> list[Document]:
    """The encyclopedia as LlamaIndex documents; the model sees title and text."""
    from llama_index.core.schema import Document

    found = []
    for number, passage in enumerate(bundled_corpus()):
        # The next run recognises the document by its id.
        document = Document(
            text=passage.text, metadata={"title": passage.title}, id_=f"bundled-{number}"
        )
        set_source(document, SOURCE)
        found.append(document)
    return found


def run_demo(
    folder: Path | None = None,
    *,
    model: str = "bundled",
    mode: Mode = "block",
    store: str | None = None,
    on_ingested: Callable[[IngestReport], None] | None = None,
    on_question: Callable[[DemoQuestion], None] | None = None,
) -> DemoReport:
    """Ingest the encyclopedia and answer the bundled questions.

    What a previous run left in the folder is reused. Every question is answered in both modes, so
    that times can be compared; the answer of ``mode`` is judged.

    Args:
        folder: the database's; :func:`default_folder` if None.
        model: name or path of another model to show.
        mode: ``"block"`` or ``"full"``.
        store: where keys and values go, as ``Manifest.store``; default: the folder ``kv`` of the
            database.
        on_ingested: called when the encyclopedia is ready.
        on_question: called after each question.
    """
    folder = folder or default_folder()
    database = Database.create(folder, Manifest(model=model, fingerprint="", store=store))
    report = ingest_documents(database, documents())
    if on_ingested:
        on_ingested(report)
    assistant = Assistant(database, top_k=TOP_K, max_new_tokens=MAX_NEW_TOKENS)
    asked = bundled_questions()
    modes = get_args(Mode)
    for warm_up in modes:  # not timed: the first forward passes of a process are slower
        assistant.ask(asked[0].question, mode=warm_up)
    questions = []
    for question in asked:
        answers = {each: assistant.ask(question.question, mode=each) for each in modes}
        questions.append(DemoQuestion(question, **answers, shown=answers[mode]))
        if on_question:
            on_question(questions[-1])
    kept = store or str(folder / "kv")
    return DemoReport(str(folder), kept, model, mode, report, tuple(questions))
