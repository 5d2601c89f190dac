"""BlockKVPrefetch: it reads what the LLM will be shown, and changes no node."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from llama_index.core import Document, SummaryIndex
from llama_index.core.schema import NodeWithScore, TextNode

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.prefetch import PrefetchStats
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPrefetch,
    BlockKVTransform,
    block_query_engine,
)
from blockattn_rag.model import BlockModel
from tests.engines import local
from tests.models import tiny_model, tiny_tokenizer


def llm_over(store: Path, **options: Any) -> BlockAttentionLLM:
    engine = BlockAttentionEngine(BlockModel(tiny_model(), tiny_tokenizer()), store)
    return BlockAttentionLLM(engine=engine, max_new_tokens=2, **options)


def read(llm: BlockAttentionLLM, passages: int) -> PrefetchStats:
    """What was prefetched, once so many passages were."""
    until = time.monotonic() + 20
    while (stats := local(llm.engine).prefetches).ready + stats.absent < passages:
        assert time.monotonic() < until
        time.sleep(0.005)
    return stats


def test_stored_nodes_are_read_and_go_on_as_they_came(tmp_path: Path) -> None:
    llm = llm_over(tmp_path / "kv")
    stored, new = (TextNode(text=text, metadata={"page": 3}) for text in ("One.", "Two."))
    BlockKVTransform(llm=llm)([stored])
    nodes = [NodeWithScore(node=stored, score=1.0), NodeWithScore(node=new, score=0.5)]
    assert BlockKVPrefetch(llm).postprocess_nodes(nodes, query_str="?") == nodes
    assert read(llm, 2) == PrefetchStats(ready=1, absent=1)


def test_a_block_query_engine_prefetches_before_its_other_postprocessors(tmp_path: Path) -> None:
    llm = llm_over(tmp_path / "kv")
    nodes = BlockKVTransform(llm=llm)([TextNode(text="One."), TextNode(text="Two.")])
    engine = block_query_engine(SummaryIndex(nodes), llm)
    engine.query("?")
    assert read(llm, 2).ready == 2


def test_full_mode_reads_no_passage(tmp_path: Path) -> None:
    full = llm_over(tmp_path / "kv", mode="full")
    stored, new = TextNode(text="One."), TextNode(text="Two.")
    BlockKVTransform(llm=full)([stored])
    BlockKVPrefetch(full).postprocess_nodes([NodeWithScore(node=stored)])
    block = full.model_copy(update={"mode": "block"})
    BlockKVPrefetch(block).postprocess_nodes([NodeWithScore(node=new)])
    assert read(block, 1) == PrefetchStats(absent=1)


def test_a_server_that_was_not_asked_yet_is_not_asked_for_it(port: int) -> None:
    llm = BlockAttentionLLM(api_base=f"http://127.0.0.1:{port}/v1")  # where nothing listens
    BlockKVPrefetch(llm).postprocess_nodes([NodeWithScore(node=Document(text="One."))])
    assert llm.source._engine is None
