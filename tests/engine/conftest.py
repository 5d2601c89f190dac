"""A tiny model marked as block-fine-tuned, with an engine, a store and a fetcher."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.fetcher import BlockFetcher
from blockattn_rag.model import BlockModel
from tests.engine.ingestion import FaultyStore
from tests.engines import tuned_model


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return tuned_model()


@pytest.fixture
def engine(model: BlockModel) -> BlockAttentionEngine:
    return BlockAttentionEngine(model)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def fetcher(model: BlockModel, store: FaultyStore) -> BlockFetcher:
    return BlockFetcher(model, store)


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of all batches of more than one request."""
    sizes: list[int] = []
    generate_batch = BlockModel.generate_batch

    def counted(model: BlockModel, rows: Any, *given: Any, **options: Any) -> Any:
        if len(rows) > 1:
            sizes.append(len(rows))
        return generate_batch(model, rows, *given, **options)

    monkeypatch.setattr(BlockModel, "generate_batch", counted)
    return sizes
