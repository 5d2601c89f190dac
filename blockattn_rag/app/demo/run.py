"""Demo that ingests a collection into Chroma, and answers questions about it in both modes.

The collection consists of the 40 articles in ``demo.facts``. The bundled model, which is used if
SmolLM2 is not installed, cannot answer questions about them. Its collection is the encyclopedia
that it was trained on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from blockattn_rag.app.demo import facts
from blockattn_rag.app.demo.corpus import bundled_corpus, bundled_questions
from blockattn_rag.app.rag.ask import Assistant, AssistantAnswer
from blockattn_rag.app.rag.database import Database, Manifest
from blockattn_rag.app.rag.documents import set_source
from blockattn_rag.app.rag.ingest import IngestReport
from blockattn_rag.engine.results import Mode, ReuseStats
from blockattn_rag.errors import DatabaseError
from blockattn_rag.files import state_folder
from blockattn_rag.prompts.formats import Passage

if TYPE_CHECKING:
    from llama_index.core.schema import Document

BUNDLED, SMOLLM2 = "bundled", "smollm2"
_ENCYCLOPEDIA, _FACTS = "encyclopedia", "facts"
"""Names of the demo's Chroma collections."""

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class Collection:
    """Passages, and questions about them."""

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
            facts.FactQuestion(
                f"encyclopedia/{number}", question.question, (question.expected,), ""
            )
            for number, question in enumerate(bundled_questions())
        )
        return Collection(_ENCYCLOPEDIA, bundled_corpus(), asked, 5, 64)
    test_set = facts.load()
    passages = tuple(Passage(article.title, article.text) for article in test_set.articles.values())
    asked = tuple(question for question in test_set.questions if question.demo)
    return Collection(_FACTS, passages, asked, 6, 40)


def speedup(ratio: float) -> str:
    """Format a ratio of two times: ``3.5 times sooner``, or ``1.2 times later`` below 1."""
    return f"{ratio:.1f} times sooner" if ratio >= 1 else f"{1 / ratio:.1f} times later"


def default_model() -> str:
    """Return SmolLM2 if the package with its weights is installed, else the bundled model."""
    from blockattn_rag.model.gguf import is_gguf, smollm2

    return SMOLLM2 if is_gguf(Path(smollm2())) else BUNDLED


def default_folder() -> Path:
    return state_folder() / "demo"


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """Question and its answers in both modes."""

    asked: facts.FactQuestion
    block: AssistantAnswer
    full: AssistantAnswer

    def is_right(self, mode: Mode) -> bool:
        return facts.is_right(self.of(mode).answer, self.asked.answers)

    def of(self, mode: Mode) -> AssistantAnswer:
        return self.block if mode == "block" else self.full

    def to_dict(self) -> dict[str, Any]:
        modes: dict[str, Any] = {
            mode: {
                "answer": self.of(mode).answer,
                "right": self.is_right(mode),
                "ttft_s": self.of(mode).stats.ttft_s,
                "generated_tokens": self.of(mode).stats.generated_tokens,
                "finish_reason": self.of(mode).finish_reason,
            }
            for mode in MODES
        }
        return {
            "question": self.asked.question,
            "expected": self.asked.answers[0],
            "sources": [source.title for source in self.block.sources],
            **self.block.stats.reuse(),
            **modes,
        }


def _check_folder(folder: Path) -> None:
    """Reject a user's database, because the demo would add passages to it."""
    manifest = Manifest.read(folder)
    is_own = folder == default_folder()  # A previous version may have created it.
    if manifest and not is_own and manifest.collection not in (_ENCYCLOPEDIA, _FACTS):
        raise DatabaseError(
            f"{folder} is a database with documents other than the demo's: choose another folder "
            f"(--db), or query this database with blockattn-rag demo --web --db {folder}"
        )


class Demo:
    """Running demo: database, collection and assistant.

    Passages that an earlier run stored are reused.
    """

    def __init__(
        self, folder: Path, model: str, store: str | None = None, *, remembers: bool = True
    ) -> None:
        started = time.perf_counter()
        self.collection = collection_for(model)
        _check_folder(folder)
        self.folder, self.model = folder, model
        self.store = store or str(folder / "kv")
        self.database = Database.create(
            folder,
            Manifest(model, "", store=store, collection=self.collection.name),
            remembers=remembers,
        )
        self.assistant = Assistant(
            self.database,
            top_k=self.collection.top_k,
            max_new_tokens=self.collection.max_new_tokens,
        )
        self.load_s = time.perf_counter() - started


def report_of(
    demo: Demo, ingest: IngestReport, answers: Sequence[DemoAnswer], ask_s: float
) -> dict[str, Any]:
    """Create the report of a completed demo, as plain JSON types. ``ask_s``: seconds for all
    answers.

    The summary contains counts of right answers, block-mode totals, and median timings.
    """
    engine = demo.database.engine
    block, full = (
        statistics.median(answer.of(mode).stats.ttft_s for answer in answers) for mode in MODES
    )
    summary = {
        "of": len(answers),
        **{f"right_{mode}": sum(answer.is_right(mode) for answer in answers) for mode in MODES},
        **sum((answer.block.stats for answer in answers), ReuseStats("block")).reuse(),
        "ttft_block_median_s": block,
        "ttft_full_median_s": full,
        "speedup": full / block if block else 0.0,
    }
    return {
        "db": str(demo.folder),
        "store": demo.store,
        "model": demo.model,
        "recipe": engine.recipe.source or str(engine.recipe),
        "stored_bytes": engine.store.stats().total_bytes,
        "load_s": demo.load_s,
        "ask_s": ask_s,
        "ingest": asdict(ingest),
        "questions": [answer.to_dict() for answer in answers],
        "summary": summary,
    }
