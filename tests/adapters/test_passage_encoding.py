"""Ingestion and answers agree on how passages are encoded."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockattn_rag.adapters.passage_encoding import passage_encoding
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction_file import save_correction
from tests.model.test_correction import correction_of
from tests.models import shared_tiny_llama, tiny_tokenizer


def test_a_path_becomes_a_text_and_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model, path = BlockModel(shared_tiny_llama(), tiny_tokenizer()), tmp_path / "kv.safetensors"
    save_correction(correction_of(model, sink="bos"), path)
    options = {"sink": "bos", "correction": path, "merge": "none"}
    assert passage_encoding(options) == {"sink": "bos", "correction": str(path)}
    assert passage_encoding({"sink": None, "correction": None}) == {
        "sink": None,
        "correction": None,
    }
    path.unlink()
    with pytest.raises(ValueError, match="found no file"):
        passage_encoding(options)
