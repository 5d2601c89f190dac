"""The flow of ``ingest``, ``ask`` and ``demo``: LlamaIndex over Chroma, with block attention."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from blockattn_rag.rag.documents import SOURCE_KEY
from blockattn_rag.rag.sources import delete_passages, ids_of

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import BaseNode, Document, NodeWithScore

    from blockattn_rag.rag.database import Database

_ADD_BATCH = 512
"""Passages embedded at once: bounds what an interruption loses."""


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What an ingestion did. ``computed`` and ``reused`` count distinct blocks."""

    documents: int
    passages: int
    added: int
    removed: int
    computed: int
    reused: int
    computed_tokens: int
    tokens_per_s: float
    stored_bytes: int
    encode_s: float
    total_s: float


def ingest_documents(
    database: Database, documents: Sequence[Document], *, show_progress: bool = True
) -> IngestReport:
    """Split documents, encode the passages, and add what is new to Chroma. Idempotent.

    Keys and values are stored first, passages added to Chroma after: whatever interrupts this,
    running it again completes it. Passages that a source no longer yields are removed.

    Args:
        database: where to.
        documents: each with its origin in ``metadata["source"]``.
        show_progress: a progress bar on stderr while blocks are encoded.
    """
    from llama_index.core.ingestion import IngestionPipeline
    from llama_index.core.node_parser import SentenceSplitter

    from blockattn_rag.engine.ingest import EncodeStats
    from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVTransform, encode_prompt_head

    # Loaded before the clock starts: imports are no work of the ingestion.
    collection, embedding = database.collection, database.embedding
    started = time.perf_counter()
    tokenizer, size = database.engine.model.tokenizer, database.manifest.chunk_size
    splitter = SentenceSplitter(
        chunk_size=size,
        chunk_overlap=size // 8,
        tokenizer=lambda text: tokenizer.final_ids(text, first=False),
        include_prev_next_rel=False,
    )
    encoder = BlockKVTransform(
        engine=database.engine, block_template=database.template, show_progress=show_progress
    )
    split = IngestionPipeline(transformations=[splitter], disable_cache=True)
    passages = with_stable_ids(split.run(documents=list(documents)))
    encode = IngestionPipeline(transformations=[encoder], disable_cache=True)
    passages = list(encode.run(nodes=passages))
    stats = encoder.stats or EncodeStats()
    encode_prompt_head(BlockAttentionLLM(engine=database.engine, block_template=database.template))
    added, removed = _synchronise(database.client, collection, embedding, passages)
    return IngestReport(
        documents=len(documents),
        passages=len(passages),
        added=added,
        removed=removed,
        computed=stats.computed,
        reused=stats.reused,
        computed_tokens=stats.computed_tokens,
        tokens_per_s=stats.computed_tokens / stats.seconds if stats.computed else 0.0,
        stored_bytes=stats.stored_bytes,
        encode_s=stats.seconds,
        total_s=time.perf_counter() - started,
    )


def with_stable_ids(nodes: Sequence[BaseNode]) -> list[BaseNode]:
    """The nodes, each with an id that its source and its text decide.

    Chroma ignores a passage whose id it has, so the id must change with the text.
    """
    from blockattn_rag.llama_index import canonical_text

    seen: Counter[str] = Counter()
    for node in nodes:
        source = str(node.metadata[SOURCE_KEY])
        text = canonical_text(node)
        name = hashlib.sha256(
            f"{len(source)}:{source}{text}".encode("utf-8", "surrogatepass")
        ).hexdigest()
        node.node_id = f"{name[:32]}-{seen[name]}"
        seen[name] += 1
    return list(nodes)


def _synchronise(
    client: ClientAPI,
    collection: Collection,
    embedding: BaseEmbedding,
    passages: Sequence[BaseNode],
) -> tuple[int, int]:
    """Make Chroma hold exactly these passages of their sources; (added, removed)."""
    from llama_index.vector_stores.chroma import ChromaVectorStore

    from blockattn_rag.llama_index import add_nodes

    sources = sorted({str(node.metadata[SOURCE_KEY]) for node in passages})
    existing = set(ids_of(collection, sources))
    new = [node for node in passages if node.node_id not in existing]
    vectors = ChromaVectorStore(chroma_collection=collection)
    for start in range(0, len(new), _ADD_BATCH):
        add_nodes(vectors, embedding(new[start : start + _ADD_BATCH]), client)
    stale = sorted(existing - {node.node_id for node in passages})
    delete_passages(collection, stale)
    return len(new), len(stale)


@dataclass(frozen=True, slots=True)
class Source:
    """A passage that an answer was given from; ``page``: its page in a PDF, or empty."""

    source: str
    page: str
    title: str
    text: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its sources and what it reused; times in seconds.

    ``ttft_s`` runs from the call of the language model to its first token; where the passages
    needed several calls, the earlier ones count whole. ``finish_reason`` is ``"length"`` where the
    answer was cut off by ``max_new_tokens`` or by the end of the context window.
    """

    question: str
    answer: str
    mode: str
    sources: tuple[Source, ...]
    hits: int
    misses: int
    reused_tokens: int
    computed_tokens: int
    generated_tokens: int
    finish_reason: str
    ttft_s: float
    total_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Assistant:
    """Answers questions from a database by a LlamaIndex query engine.

    Args:
        database: an open database.
        top_k: passages to retrieve.
        max_new_tokens: longest answer.
    """

    def __init__(self, database: Database, *, top_k: int = 5, max_new_tokens: int = 256) -> None:
        from llama_index.core import VectorStoreIndex
        from llama_index.vector_stores.chroma import ChromaVectorStore

        self._database = database
        self._top_k = top_k
        self._max_new_tokens = max_new_tokens
        self._has_head = False
        self._index = VectorStoreIndex.from_vector_store(
            ChromaVectorStore(chroma_collection=database.collection),
            embed_model=database.embedding,
        )

    def ask(
        self, question: str, *, mode: str = "block", on_text: Callable[[str], None] | None = None
    ) -> Answer:
        """Answer a question; ``on_text`` gets the answer piece by piece."""
        from blockattn_rag.llama_index import (
            BlockAttentionLLM,
            block_query_engine,
            encode_prompt_head,
        )

        options: dict[str, Any] = {"mode": mode, "max_new_tokens": self._max_new_tokens}
        llm = BlockAttentionLLM(
            engine=self._database.engine, block_template=self._database.template, **options
        )
        if mode == "block" and not self._has_head:
            encode_prompt_head(llm)  # `store gc` may have deleted it: no passage refers to it
            self._has_head = True
        engine = block_query_engine(self._index, llm, streaming=True, similarity_top_k=self._top_k)
        with _finished_calls() as calls:
            response: Any = engine.query(question)
            pieces = []
            for piece in response.response_gen:
                pieces.append(piece)
                if on_text:
                    on_text(piece)
        sources = tuple(_source(node) for node in response.source_nodes)
        return _answer(question, "".join(pieces).strip(), mode, sources, calls)


def _answer(
    question: str, text: str, mode: str, sources: tuple[Source, ...], calls: Sequence[Any]
) -> Answer:
    names = ("hits", "misses", "reused_tokens", "computed_tokens", "generated_tokens", "total_s")
    used = [call["usage"] for call in calls]
    sums = {name: sum(usage[name] for usage in used) for name in names}
    ttft_s = sum(usage["total_s"] for usage in used[:-1]) + (used[-1]["ttft_s"] if used else 0.0)
    finish_reason = calls[-1]["finish_reason"] if calls else "stop"
    return Answer(question, text, mode, sources, finish_reason=finish_reason, ttft_s=ttft_s, **sums)


def _source(found: NodeWithScore) -> Source:
    node = found.node
    return Source(
        source=str(node.metadata.get(SOURCE_KEY, "")),
        page=str(node.metadata.get("page_label", "")),
        title=str(node.metadata.get("title", "")),
        text=node.get_content(),
        score=found.score,
    )


@contextlib.contextmanager
def _finished_calls() -> Iterator[list[Any]]:
    """Collects what the language model reports of each call: ``usage`` and ``finish_reason``."""
    from llama_index.core.instrumentation.event_handlers import BaseEventHandler
    from llama_index.core.instrumentation.events import BaseEvent
    from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
    from llama_index_instrumentation import get_dispatcher

    calls: list[Any] = []

    class Collector(BaseEventHandler):
        @classmethod
        def class_name(cls) -> str:
            return "CallCollector"

        def handle(self, event: BaseEvent, **kwargs: Any) -> None:
            if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent) and event.response:
                calls.append(event.response.raw)

    root, collector = get_dispatcher(), Collector()
    root.add_event_handler(collector)
    try:
        yield calls
    finally:
        root.event_handlers.remove(collector)
