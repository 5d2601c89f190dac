"""Fixtures: a small hybrid model with random weights, and prompts for it."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from blockattn_rag.model.loading import load_model, load_tokenizer
from recipes.hybrid_states.model import build_model
from recipes.hybrid_states.prompts import Prompt, PromptWriter


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = load_tokenizer("bundled")
    return tokenizer


@pytest.fixture(scope="session")
def bundled() -> PreTrainedModel:
    return load_model("bundled", device="cpu", dtype=torch.float32)


@pytest.fixture
def model(bundled: PreTrainedModel) -> Qwen3_5ForCausalLM:
    model = build_model(bundled)
    model.train(False)
    return model


@pytest.fixture(scope="session")
def prompts(tokenizer: PreTrainedTokenizerFast) -> list[Prompt]:
    writer = PromptWriter(tokenizer, random.Random(0))
    return [writer.training((passages, passages), turns=2) for passages in (3, 1, 2)]
