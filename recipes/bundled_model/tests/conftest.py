"""What the tests of this recipe share: repeatable examples, and one tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from recipes.bundled_model.tokenizer import build_tokenizer

# Shared machines are slow at times; a deadline would fail on them by chance.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(seed=0, scenes=400)
