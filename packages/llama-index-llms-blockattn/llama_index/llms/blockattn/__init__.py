"""The LlamaIndex adapter of ``blockattn_rag`` under the name that LlamaIndex users look for.

Every name is ``blockattn_rag.llama_index``'s, imported on first use::

    from llama_index.llms.blockattn import BlockAttentionLLM

    llm = BlockAttentionLLM(model_name="bundled", kv_store="kv")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockattn_rag import __version__ as __version__
from blockattn_rag import llama_index as _adapter

if TYPE_CHECKING:
    from blockattn_rag.llama_index import *  # noqa: F403

__all__ = _adapter.__all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_adapter, name)


def __dir__() -> list[str]:
    return list(__all__)
