"""One model, one store, and the answers. Names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.engine.ingest import EncodeStats
    from blockattn_rag.engine.recipe import Recipe
    from blockattn_rag.engine.results import Generation, GenerationChunk, ReuseStats

_HOMES = {
    "engine": "BlockAttentionEngine",
    "ingest": "EncodeStats",
    "recipe": "Recipe",
    "results": "Generation GenerationChunk ReuseStats",
}

__all__ = [
    "BlockAttentionEngine",
    "EncodeStats",
    "Generation",
    "GenerationChunk",
    "Recipe",
    "ReuseStats",
]


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
