"""LlamaIndex adapter: an LLM, an ingestion step and a postprocessor, imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockattn_rag.adapters.handles import HANDLE_KEY, live_handles
from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.llama_index.ingestion import BlockKVTransform, HashingEmbedding, add_nodes
    from blockattn_rag.llama_index.llm import BlockAttentionLLM
    from blockattn_rag.llama_index.messages import BlockReuseEvent
    from blockattn_rag.llama_index.nodes import (
        BlockKVPostprocessor,
        BlockNode,
        as_block_node,
        canonical_text,
    )
    from blockattn_rag.llama_index.packing import BlockPromptHelper
    from blockattn_rag.llama_index.query_engines import (
        BlockCitationQueryEngine,
        block_query_engine,
        block_response_synthesizer,
        configure,
        encode_prompt_head,
    )
    from blockattn_rag.llama_index.served import served_llm

__all__ = [
    "HANDLE_KEY",
    "BlockAttentionLLM",
    "BlockCitationQueryEngine",
    "BlockKVPostprocessor",
    "BlockKVTransform",
    "BlockNode",
    "BlockPromptHelper",
    "BlockReuseEvent",
    "HashingEmbedding",
    "add_nodes",
    "as_block_node",
    "block_query_engine",
    "block_response_synthesizer",
    "canonical_text",
    "configure",
    "encode_prompt_head",
    "live_handles",
    "served_llm",
]

__getattr__, __dir__ = lazy_names(
    __name__, extra="llama-index", extra_packages=("llama_index", "chromadb", "sklearn")
)
