"""Block-Attention in LlamaIndex: a local LLM, an ingestion step, a postprocessor.

Names are imported when they are first used::

    from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVPostprocessor

    llm = BlockAttentionLLM(model_name="bundled", kv_store="kv")
    engine = index.as_query_engine(llm=llm, node_postprocessors=[BlockKVPostprocessor()])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockattn_rag.adapters.handles import HANDLE_KEY, live_handles
from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.llama_index.chroma import add_nodes
    from blockattn_rag.llama_index.citation import BlockCitationQueryEngine
    from blockattn_rag.llama_index.embedding import HashingEmbedding
    from blockattn_rag.llama_index.events import BlockReuseEvent
    from blockattn_rag.llama_index.llm import BlockAttentionLLM
    from blockattn_rag.llama_index.nodes import BlockNode, as_block_node, canonical_text
    from blockattn_rag.llama_index.postprocessor import BlockKVPostprocessor
    from blockattn_rag.llama_index.prefetch import BlockKVPrefetch
    from blockattn_rag.llama_index.prompt_helper import BlockPromptHelper
    from blockattn_rag.llama_index.synthesis import (
        block_query_engine,
        block_response_synthesizer,
        configure,
        encode_prompt_head,
    )
    from blockattn_rag.llama_index.transform import BlockKVTransform

_HOMES = {
    "llm": "BlockAttentionLLM",
    "citation": "BlockCitationQueryEngine",
    "postprocessor": "BlockKVPostprocessor",
    "prefetch": "BlockKVPrefetch",
    "transform": "BlockKVTransform",
    "nodes": "BlockNode as_block_node canonical_text",
    "prompt_helper": "BlockPromptHelper",
    "events": "BlockReuseEvent",
    "embedding": "HashingEmbedding",
    "chroma": "add_nodes",
    "synthesis": "block_query_engine block_response_synthesizer configure encode_prompt_head",
}

__all__ = [
    "HANDLE_KEY",
    "BlockAttentionLLM",
    "BlockCitationQueryEngine",
    "BlockKVPostprocessor",
    "BlockKVPrefetch",
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
]


__getattr__, __dir__ = lazy_names(
    __name__, _HOMES, extra="llama-index", extra_packages=("llama_index", "chromadb", "sklearn")
)
