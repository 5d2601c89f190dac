"""Ingestion: splits documents, encodes and stores passages, and adds them to Chroma."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import blockattn_rag.llama_index as adapter
from blockattn_rag.app.rag.database import JOURNAL, Database
from blockattn_rag.app.rag.documents import SOURCE_KEY
from blockattn_rag.app.rag.passages import delete_passages, ids_of
from blockattn_rag.prompts.blocks import Block, handle_of

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection
    from llama_index.core.schema import BaseNode, Document


_ADD_BATCH = 128
"""Passages per embedding batch. An interruption loses at most one batch."""


@dataclass(frozen=True, slots=True)
class IngestReport:
    """Counts and timings of an ingestion.

    ``computed`` and ``reused`` count distinct blocks. Equal passages share a block.
    """

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
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
    before_encoding: Callable[[Sequence[Block]], None] = lambda _: None,
) -> IngestReport:
    """Split documents, encode the passages, and add new passages to Chroma. Idempotent.

    Keys and values are stored before passages are added to Chroma, so another run completes an
    interrupted ingestion. With servers, a journal in the database's folder records stored passages
    until the ingestion is complete. Passages that are no longer in their source are removed.

    Args:
        documents: Documents with ``metadata["source"]``.
        on_progress: Called with a stage's name, and the numbers done so far and in total.
        before_encoding: Called with the blocks, unless the model runs on a server.
    """
    from llama_index.core.node_parser import SentenceSplitter

    from blockattn_rag.llama_index.nodes import stamp

    collection = database.collection  # Fail before encoding if Chroma cannot be opened.
    tokenizer, size = database.tokenizer, database.manifest.chunk_size
    splitter = SentenceSplitter(
        chunk_size=size,
        chunk_overlap=size // 8,
        tokenizer=lambda text: tokenizer.final_ids(text, first=False),
        include_prev_next_rel=False,
    )
    started = time.perf_counter()
    nodes = with_stable_ids(splitter(documents))
    texts = [adapter.canonical_text(node) for node in nodes]
    blocks = [Block(text, database.template) for text in texts if text]
    pool = None
    if database.server is not None:
        from blockattn_rag.server import ServerClient, ServerPool

        clients = map(ServerClient, database.manifest.servers)
        pool = ServerPool([*clients], database.path / JOURNAL)
        tick = partial(on_progress, "encoding characters of passages")
        stats = pool.encode([block.text for block in blocks], on_progress=tick)
    else:
        before_encoding(blocks)
        tick = partial(on_progress, "encoding tokens of passages")
        stats = database.engine.precompute(blocks, on_progress=tick)
        llm = adapter.BlockAttentionLLM(engine=database.engine, block_template=database.template)
        adapter.encode_prompt_head(llm)
    passages = [
        stamp(node, text) if text else node for node, text in zip(nodes, texts, strict=True)
    ]
    added, removed = synchronize(database, collection, passages, on_progress)
    if pool is not None:
        pool.remove_journal()
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
    """Set node IDs that depend only on source and text. Duplicates in a source are numbered.

    Chroma ignores passages with existing IDs, so the ID must change with the text.
    """
    seen: Counter[str] = Counter()
    for node in nodes:
        source = str(node.metadata[SOURCE_KEY])
        name = handle_of(f"{len(source)}:{source}{adapter.canonical_text(node)}")
        node.node_id = f"{name}-{seen[name]}"
        seen[name] += 1
    return list(nodes)


def synchronize(
    database: Database,
    collection: Collection,
    passages: Sequence[BaseNode],
    report: Callable[[str, int, int], None],
) -> tuple[int, int]:
    """Make Chroma contain exactly these passages for their sources. Returns (added, removed)."""
    from llama_index.vector_stores.chroma import ChromaVectorStore

    sources = sorted({str(node.metadata[SOURCE_KEY]) for node in passages})
    existing = set(ids_of(collection, sources))
    new = [node for node in passages if node.node_id not in existing]
    vectors = ChromaVectorStore(chroma_collection=collection)
    for start in range(0, len(new), _ADD_BATCH):
        report("adding passages to Chroma", start, len(new))
        batch = new[start : start + _ADD_BATCH]
        adapter.add_nodes(vectors, database.embedding(batch), database.client)
        report("adding passages to Chroma", start + len(batch), len(new))
    stale = sorted(existing - {node.node_id for node in passages})
    delete_passages(collection, stale)
    return len(new), len(stale)
