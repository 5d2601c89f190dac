"""Engines as tests need them."""

from __future__ import annotations

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.protocol import Engine


def local(engine: Engine) -> BlockAttentionEngine:
    """The engine, which has its model in this process."""
    assert isinstance(engine, BlockAttentionEngine)
    return engine
