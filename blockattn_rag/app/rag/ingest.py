"""Ingestion: splits documents, encodes and stores passages, and adds them to Chroma."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import blockattn_rag.llama_index as adapter
from blockattn_rag.app.rag.database import JOURNAL, Database
from blockattn_rag.app.rag.documents import SOURCE_KEY
from blockattn_rag.app.rag.passages import delete_passages, ids_of
from blockattn_rag.prompts.blocks import Block, handle_of

if TYPE_CHECKING:
    from llama_index.core.schema import BaseNode, Document

    from blockattn_rag.engine.engine import BlockAttentionEngine

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
    on_estimate: Callable[[Estimate], None] = lambda _: None,
) -> IngestReport:
    """Split documents, encode the passages, and add new passages to Chroma. Idempotent.

    Keys and values are stored before passages are added to Chroma, so another run completes an
    interrupted ingestion. With servers, a journal in the database's folder records stored passages
    until the ingestion is complete. Passages that are no longer in their source are removed.

    Args:
        documents: Documents with ``metadata["source"]``.
        on_estimate: Called with an estimate before passages are encoded by a model in this process.
    """
    from llama_index.core.node_parser import SentenceSplitter

    from blockattn_rag.llama_index.nodes import stamp

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
        if (work := estimate(database.engine, blocks)) is not None:
            on_estimate(work)
        tick = partial(on_progress, "encoding tokens of passages")
        stats = database.engine.precompute(blocks, on_progress=tick)
        llm = adapter.BlockAttentionLLM(engine=database.engine, block_template=database.template)
        adapter.encode_prompt_head(llm)
    passages = [
        stamp(node, text) if text else node for node, text in zip(nodes, texts, strict=True)
    ]
    added, removed = synchronize(database, passages, on_progress)
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
    """Set node IDs that depend only on source and text.

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
    database: Database, passages: Sequence[BaseNode], report: Callable[[str, int, int], None]
) -> tuple[int, int]:
    """Synchronize Chroma, so that sources have exactly these passages. Returns (added, removed)."""
    from llama_index.vector_stores.chroma import ChromaVectorStore

    collection = database.collection
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


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated work of an ingestion."""

    new_blocks: int
    new_tokens: int
    new_text_bytes: int
    new_bytes: int
    int8_bytes: int
    seconds: float | None
    folder: Path | None
    free_bytes: int | None


def estimate(engine: BlockAttentionEngine, blocks: Sequence[Block]) -> Estimate | None:
    """Estimate the work of encoding blocks. None if all are stored.

    If the store is not a folder, all blocks count as new, because each lookup is a request.
    """
    from blockattn_rag.lab.planning import footprint, measured_operations_per_s, prefill_flops
    from blockattn_rag.store import DirectoryStore

    model, store = engine.model, engine.store
    distinct = {block.handle: block for block in blocks}.values()
    folder = store.path if isinstance(store, DirectoryStore) else None
    new = [block for block in distinct if folder is None or not engine.contains(block)]
    if not new:
        return None
    sizes = [len(model.tokenizer.block_ids(block, first=False)) for block in new]
    config = model.config.get_text_config(decoder=True)
    new_bytes, int8_bytes = (
        sum(map(footprint(config, model.dtype, kind).block_bytes, sizes))
        for kind in (engine.kv_dtype, "int8")
    )
    seconds = free_bytes = None
    if hasattr(config, "intermediate_size"):
        speed = measured_operations_per_s(model.dtype, model.device.type)
        seconds = sum(prefill_flops(config, size) for size in sizes) / speed
    if folder is not None:
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        free_bytes = shutil.disk_usage(existing).free
    return Estimate(
        new_blocks=len(new),
        new_tokens=sum(sizes),
        new_text_bytes=sum(len(block.text.encode()) for block in new),
        new_bytes=new_bytes,
        int8_bytes=int8_bytes,
        seconds=seconds,
        folder=folder,
        free_bytes=free_bytes,
    )
