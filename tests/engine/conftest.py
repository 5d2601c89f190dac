"""What tests of the engine share. The model is that of a test's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockattn_rag.model import BlockModel
from blockattn_rag.model.reader import Reader


@pytest.fixture
def reader(model: BlockModel, tmp_path: Path) -> Path:
    """The folder of a reader that changes answers."""
    made = Reader.new(model.hf_model, rank=2)
    for matrix in made.parameters():
        matrix.requires_grad_(False).add_(0.3)
    made.save(tmp_path / "reader", {"fingerprint": model.fingerprint})
    return tmp_path / "reader"
