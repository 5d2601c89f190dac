"""Demo that ingests a collection into Chroma, and answers questions about it in both modes.

The collection consists of the 40 articles in ``demo.facts``. The bundled model, which is used if
SmolLM2 is not installed, cannot answer questions about them. Its collection is the encyclopedia
that it was trained on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from blockattn_rag.app.demo import facts
from blockattn_rag.app.demo.corpus import bundled_corpus, bundled_questions
from blockattn_rag.app.rag.ask import Assistant, AssistantAnswer
from blockattn_rag.app.rag.database import Database, Manifest
from blockattn_rag.app.rag.documents import set_source
from blockattn_rag.app.rag.ingest import IngestReport
from blockattn_rag.engine.results import Mode
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


class Demo:
    """Running demo: database, collection and assistant."""

    def __init__(
        self, folder: Path, model: str, store: str | None, *, remembers: bool = True
    ) -> None:
        started = time.perf_counter()
        manifest = Manifest.read(folder)
        is_own = folder == default_folder()  # A previous version may have created it.
        if manifest and not is_own and manifest.collection not in (_ENCYCLOPEDIA, _FACTS):
            raise DatabaseError(
                f"{folder} is a database with documents other than the demo's: choose another "
                "folder (--db), or query this database with blockattn-rag demo --web --db "
                f"{folder}"
            )
        self.collection = collection_for(model)
        self.model = model
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


def row_of(question: facts.FactQuestion, answers: Mapping[Mode, AssistantAnswer]) -> dict[str, Any]:
    """Return a question of the report: reuse in block mode, and the answers in both modes."""
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


def report_of(
    demo: Demo, ingest: IngestReport, questions: Sequence[dict[str, Any]], ask_s: float
) -> dict[str, Any]:
    """Create the report of a completed demo, as plain JSON types. ``ask_s``: seconds for all
    answers.

    The summary contains counts of right answers, block-mode totals, and median timings.
    """
    engine = demo.database.engine
    block, full = (statistics.median(row[mode]["ttft_s"] for row in questions) for mode in MODES)
    totals = ("hits", "misses", "reused_tokens", "computed_tokens")
    return {
        "db": str(demo.database.path),
        "store": demo.store,
        "model": demo.model,
        "recipe": engine.recipe.source or str(engine.recipe),
        "stored_bytes": engine.store.stats().total_bytes,
        "load_s": demo.load_s,
        "ask_s": ask_s,
        "ingest": asdict(ingest),
        "questions": questions,
        "summary": {
            "of": len(questions),
            **{f"right_{mode}": sum(row[mode]["right"] for row in questions) for mode in MODES},
            **{name: sum(row[name] for row in questions) for name in totals},
            "ttft_block_median_s": block,
            "ttft_full_median_s": full,
            "speedup": full / block if block else 0.0,
        },
    }
