"""Block mode on vLLM servers: the connector and endpoints, and clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.server.client import ServerClient
    from blockattn_rag.server.pool import ServerPool

__all__ = ["ServerClient", "ServerPool"]

__getattr__, __dir__ = lazy_names(__name__, extra="serving", extra_packages=("httpx", "openai"))
