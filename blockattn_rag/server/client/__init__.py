"""A server's model as an engine of this process. Names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.server.client.engine import RemoteEngine

_HOMES = {"engine": "RemoteEngine"}

__all__ = ["RemoteEngine"]


__getattr__, __dir__ = lazy_names(__name__, _HOMES, extra="serving", extra_packages=("httpx",))
