"""LangChain adapter: a chat model, a document prompt and an ingestion step, imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockattn_rag.adapters.handles import HANDLE_KEY, live_handles
from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.langchain.agents import RetrieveFirst, block_retriever_tool
    from blockattn_rag.langchain.chat import ChatBlockAttention
    from blockattn_rag.langchain.documents import (
        BlockDocumentPrompt,
        BlockKVCompressor,
        format_blocks,
    )
    from blockattn_rag.langchain.ingestion import BlockKVTransformer, HashingEmbeddings
    from blockattn_rag.langchain.messages import without_markers
    from blockattn_rag.langchain.served import served_llm

__all__ = [
    "HANDLE_KEY",
    "BlockDocumentPrompt",
    "BlockKVCompressor",
    "BlockKVTransformer",
    "ChatBlockAttention",
    "HashingEmbeddings",
    "RetrieveFirst",
    "block_retriever_tool",
    "format_blocks",
    "live_handles",
    "served_llm",
    "without_markers",
]

__getattr__, __dir__ = lazy_names(
    __name__, extra="langchain", extra_packages=("langchain", "langchain_core", "sklearn")
)
