"""Block-Attention in LangChain: a local chat model, a document prompt, an ingestion step.

Names are imported when they are first used::

    from blockattn_rag.langchain import BlockDocumentPrompt, ChatBlockAttention

    chat = ChatBlockAttention(model="bundled", kv_store="kv")
    chain = create_stuff_documents_chain(chat, prompt, document_prompt=BlockDocumentPrompt())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from blockattn_rag.handles import HANDLE_KEY, live_handles

if TYPE_CHECKING:
    from blockattn_rag.langchain.chat import ChatBlockAttention
    from blockattn_rag.langchain.completion import BlockAttentionLLM
    from blockattn_rag.langchain.compressor import BlockKVCompressor
    from blockattn_rag.langchain.documents import BlockDocumentPrompt, format_blocks
    from blockattn_rag.langchain.embedding import HashingEmbeddings
    from blockattn_rag.langchain.transformer import BlockKVTransformer

_HOMES = {
    "BlockAttentionLLM": "completion",
    "BlockDocumentPrompt": "documents",
    "BlockKVCompressor": "compressor",
    "BlockKVTransformer": "transformer",
    "ChatBlockAttention": "chat",
    "HashingEmbeddings": "embedding",
    "format_blocks": "documents",
}

__all__ = [
    "HANDLE_KEY",
    "BlockAttentionLLM",
    "BlockDocumentPrompt",
    "BlockKVCompressor",
    "BlockKVTransformer",
    "ChatBlockAttention",
    "HashingEmbeddings",
    "format_blocks",
    "live_handles",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("langchain_core", "sklearn"):
            raise
        raise ImportError(
            f"blockattn_rag.langchain.{name} needs {error.name}, which is not installed: "
            'pip install "blockattn-rag[langchain]"'
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
