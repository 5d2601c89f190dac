"""A small hybrid model with random weights, and prompts for it."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from blockattn_rag.model.loading import load_model, load_tokenizer
from recipes.hybrid_states.model import build_model
from recipes.hybrid_states.prompts import Prompt, PromptWriter


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer("bundled")


@pytest.fixture(scope="session")
def bundled() -> LlamaForCausalLM:
    return load_model("bundled", device="cpu", dtype=torch.float32)


@pytest.fixture
def model(bundled: LlamaForCausalLM) -> Qwen3_5ForCausalLM:
    return build_model(bundled).eval()


@pytest.fixture(scope="session")
def prompts(tokenizer: PreTrainedTokenizerFast) -> list[Prompt]:
    writer = PromptWriter(tokenizer, random.Random(0))
    return [writer.training((passages, passages), turns=2) for passages in (3, 1, 2)]
