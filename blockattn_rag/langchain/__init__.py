"""Block-Attention in LangChain: a local chat model, a document prompt, an ingestion step.

Names are imported when they are first used::

    from blockattn_rag.langchain import BlockDocumentPrompt, ChatBlockAttention

    chat = ChatBlockAttention(model="bundled", kv_store="kv")
    chain = create_stuff_documents_chain(chat, prompt, document_prompt=BlockDocumentPrompt())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockattn_rag.adapters.handles import HANDLE_KEY, live_handles
from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.langchain.agents import RetrieveFirst, block_retriever_tool
    from blockattn_rag.langchain.chat import ChatBlockAttention
    from blockattn_rag.langchain.cleaning import without_markers
    from blockattn_rag.langchain.completion import BlockAttentionLLM
    from blockattn_rag.langchain.compressor import BlockKVCompressor
    from blockattn_rag.langchain.documents import BlockDocumentPrompt, format_blocks
    from blockattn_rag.langchain.embedding import HashingEmbeddings
    from blockattn_rag.langchain.transformer import BlockKVTransformer

_HOMES = {
    "agents": "RetrieveFirst block_retriever_tool",
    "completion": "BlockAttentionLLM",
    "documents": "BlockDocumentPrompt format_blocks",
    "compressor": "BlockKVCompressor",
    "transformer": "BlockKVTransformer",
    "chat": "ChatBlockAttention",
    "embedding": "HashingEmbeddings",
    "cleaning": "without_markers",
}

__all__ = [
    "HANDLE_KEY",
    "BlockAttentionLLM",
    "BlockDocumentPrompt",
    "BlockKVCompressor",
    "BlockKVTransformer",
    "ChatBlockAttention",
    "HashingEmbeddings",
    "RetrieveFirst",
    "block_retriever_tool",
    "format_blocks",
    "live_handles",
    "without_markers",
]


__getattr__, __dir__ = lazy_names(
    __name__, _HOMES, extra="langchain", extra_packages=("langchain", "langchain_core", "sklearn")
)
