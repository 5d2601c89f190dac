"""``ingest``: documents are split, encoded and stored, then added to Chroma."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import blockattn_rag.llama_index as adapter
from blockattn_rag.app.rag.database import Database
from blockattn_rag.app.rag.documents import SOURCE_KEY
from blockattn_rag.app.rag.estimate import Estimate, estimate
from blockattn_rag.app.rag.sources import delete_passages, ids_of
from blockattn_rag.prompts.blocks import Block, handle_of

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection
    from llama_index.core.schema import BaseNode, Document

_ADD_BATCH = 128
"""Passages embedded at once: bounds what an interruption loses."""


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What an ingestion did. ``computed`` and ``reused`` count distinct blocks: equal passages
    share one."""

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
    database: Database,
    documents: Sequence[Document],
    *,
    on_progress: Callable[[str, int, int], None] | None = None,
    on_estimate: Callable[[Estimate], None] | None = None,
) -> IngestReport:
    """Split documents, encode the passages, and add what is new to Chroma. Idempotent.

    Keys and values are stored first, passages added to Chroma after: whatever interrupts this,
    running it again completes it. Passages that a source no longer yields are removed.

    Args:
        database: where to.
        documents: each with its origin in ``metadata["source"]``.
        on_progress: called with (stage, done, total).
        on_estimate: called before anything is encoded, unless a server has the model.
    """
    from llama_index.core.node_parser import SentenceSplitter

    from blockattn_rag.llama_index.nodes import stamp

    # Loaded before the clock starts: imports are no work of the ingestion.
    collection, engine = database.collection, database.engine
    tokenizer, size = engine.model.tokenizer, database.manifest.chunk_size
    splitter = SentenceSplitter(
        chunk_size=size,
        chunk_overlap=size // 8,
        tokenizer=lambda text: tokenizer.final_ids(text, first=False),
        include_prev_next_rel=False,
    )
    tell = on_progress or _tell_nobody
    started = time.perf_counter()
    nodes = with_stable_ids(splitter(documents))
    texts = [adapter.canonical_text(node) for node in nodes]
    blocks = [Block(text, database.template) for text in texts if text]
    stored = 0
    if on_estimate is not None and (found := estimate(database, blocks)) is not None:
        on_estimate(found)
        stored = found.blocks - found.new_blocks
    encoding = "encoding passages"
    tell(encoding, stored, len({block.handle for block in blocks}))
    stats = engine.precompute(blocks, on_progress=partial(tell, encoding))
    tell(encoding, stats.computed + stats.reused, stats.computed + stats.reused)
    llm = adapter.BlockAttentionLLM(engine=engine, block_template=database.template)
    adapter.encode_prompt_head(llm)
    passages = [
        stamp(node, text) if text else node for node, text in zip(nodes, texts, strict=True)
    ]
    added, removed = _synchronise(database, collection, passages, tell)
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


def _tell_nobody(stage: str, done: int, total: int) -> None:
    pass


def with_stable_ids(nodes: Sequence[BaseNode]) -> list[BaseNode]:
    """The nodes, each with an id that its source and its text decide.

    Chroma ignores a passage whose id it has, so the id must change with the text.
    """
    seen: Counter[str] = Counter()
    for node in nodes:
        source = str(node.metadata[SOURCE_KEY])
        name = handle_of(f"{len(source)}:{source}{adapter.canonical_text(node)}")
        node.node_id = f"{name}-{seen[name]}"
        seen[name] += 1
    return list(nodes)


def _synchronise(
    database: Database,
    collection: Collection,
    passages: Sequence[BaseNode],
    tell: Callable[[str, int, int], None],
) -> tuple[int, int]:
    """Make Chroma hold exactly these passages of their sources; (added, removed)."""
    from llama_index.vector_stores.chroma import ChromaVectorStore

    sources = sorted({str(node.metadata[SOURCE_KEY]) for node in passages})
    existing = set(ids_of(collection, sources))
    new = [node for node in passages if node.node_id not in existing]
    vectors = ChromaVectorStore(chroma_collection=collection)
    adding = "adding passages to Chroma"
    if new:
        tell(adding, 0, len(new))
    for start in range(0, len(new), _ADD_BATCH):
        batch = new[start : start + _ADD_BATCH]
        adapter.add_nodes(vectors, database.embedding(batch), database.client)
        tell(adding, start + len(batch), len(new))
    stale = sorted(existing - {node.node_id for node in passages})
    delete_passages(collection, stale)
    return len(new), len(stale)
