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

if TYPE_CHECKING:
    from llama_index.core.schema import Document

    from blockattn_rag.rag.ask import Answer, Assistant
    from blockattn_rag.rag.ingest import IngestReport

SOURCE = "bundled encyclopedia"
TOP_K = 5
MAX_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """A question, its answer, and what the answer cost. ``stats`` are those of the block-mode
    answer, ``ttft_full_s`` is the time to first token in full mode. ``finish_reason`` is
    ``"length"`` where the shown answer was cut off."""

    question: str
    answer: str
    expected: str
    correct: bool
    sources: tuple[str, ...]
    stats: ReuseStats
    ttft_full_s: float
    finish_reason: str

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types, the figures beside the other fields; times in seconds."""
        return {
            "question": self.question,
            "answer": self.answer,
            "expected": self.expected,
            "correct": self.correct,
            "sources": list(self.sources),
            **self.stats.reuse(),
            "ttft_block_s": self.stats.ttft_s,
            "ttft_full_s": self.ttft_full_s,
            "finish_reason": self.finish_reason,
        }


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The whole demo. ``mode`` is the mode whose answers are shown and judged."""

    db: str
    model: str
    mode: Mode
    ingest: IngestReport
    questions: tuple[DemoQuestion, ...]

    @property
    def summary(self) -> dict[str, Any]:
        """Totals, and medians of the times."""
        block = statistics.median(q.stats.ttft_s for q in self.questions)
        full = statistics.median(q.ttft_full_s for q in self.questions)
        return {
            "right": sum(q.correct for q in self.questions),
            "of": len(self.questions),
            **sum((q.stats for q in self.questions), ReuseStats("block")).reuse(),
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

    from blockattn_rag.rag.documents import set_source

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
        on_ingested: called when the encyclopedia is ready.
        on_question: called after each question.
    """
    from blockattn_rag.rag.ask import Assistant
    from blockattn_rag.rag.database import Database, Manifest
    from blockattn_rag.rag.ingest import ingest_documents

    folder = folder or default_folder()
    database = Database.create(folder, Manifest(model=model, fingerprint=""))
    report = ingest_documents(database, documents())
    if on_ingested:
        on_ingested(report)
    assistant = Assistant(database, top_k=TOP_K, max_new_tokens=MAX_NEW_TOKENS)
    asked = bundled_questions()
    _warm_up(assistant, asked[0].question)
    questions = []
    for question in asked:
        questions.append(_ask(assistant, question, mode))
        if on_question:
            on_question(questions[-1])
    return DemoReport(str(folder), model, mode, report, tuple(questions))


def _warm_up(assistant: Assistant, question: str) -> None:
    """Ask in both modes, because the first forward passes of a process are slower: they must not
    be part of the first question's times."""
    for mode in get_args(Mode):
        assistant.ask(question, mode=mode)


def _ask(assistant: Assistant, asked: Question, mode: Mode) -> DemoQuestion:
    answers: dict[Mode, Answer] = {m: assistant.ask(asked.question, mode=m) for m in get_args(Mode)}
    shown = answers[mode]
    return DemoQuestion(
        question=asked.question,
        answer=shown.answer,
        expected=asked.expected,
        correct=is_correct(asked, shown.answer),
        sources=tuple(source.title for source in shown.sources),
        stats=answers["block"].stats,
        ttft_full_s=answers["full"].stats.ttft_s,
        finish_reason=shown.finish_reason,
    )
