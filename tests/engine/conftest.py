"""What a model is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.model import BlockModel


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of each batch that a model generates from now on."""
    sizes: list[int] = []
    generate_batch = BlockModel.generate_batch

    def counted(model: BlockModel, rows: Any, *given: Any, **options: Any) -> Any:
        sizes.append(len(rows))
        return generate_batch(model, rows, *given, **options)

    monkeypatch.setattr(BlockModel, "generate_batch", counted)
    return sizes
