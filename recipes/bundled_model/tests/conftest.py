"""Shared fixtures: reproducible Hypothesis examples, and one tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from recipes.bundled_model.tokenizer import build_tokenizer

# Without deadlines, because tests would otherwise fail randomly on slow shared machines.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(seed=0, scenes=400)
