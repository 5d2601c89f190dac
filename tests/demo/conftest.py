"""One tokenizer for all tests of the demo: training it takes a second."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from blockattn_rag.demo.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(seed=0, scenes=400)
