"""One model, one store, and the answers. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.engine.ingest import EncodeStats
    from blockattn_rag.engine.results import Generation, GenerationChunk, ReuseStats

_HOMES = {
    "BlockAttentionEngine": "engine",
    "EncodeStats": "ingest",
    "Generation": "results",
    "GenerationChunk": "results",
    "ReuseStats": "results",
}

__all__ = ["BlockAttentionEngine", "EncodeStats", "Generation", "GenerationChunk", "ReuseStats"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
