"""Engines, which answer prompts with a model and a KV store. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.engine.ingest import EncodeStats
    from blockattn_rag.engine.recipe import Recipe
    from blockattn_rag.engine.results import Generation, GenerationChunk, ReuseStats

__all__ = [
    "BlockAttentionEngine",
    "EncodeStats",
    "Generation",
    "GenerationChunk",
    "Recipe",
    "ReuseStats",
]

__getattr__, __dir__ = lazy_names(__name__)
