"""Greedy answers of full mode: each token has the largest logit, whatever the generation config."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import GenerationConfig

from blockattn_rag.model import BlockModel
from blockattn_rag.model.decoding import greedy_answers
from tests.models import shared_tiny_llama, tiny_tokenizer

PROMPTS = [list(b"How tall is Halden Tower?"), list(b"When?")]
NEW = 12


def answers(**config: Any) -> list[list[int]]:
    """Return a model's answers with this generation config, and check that they are greedy."""
    model = BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer())
    model.hf_model.generation_config = GenerationConfig(**config)  # type: ignore[no-untyped-call]
    found = greedy_answers(model.hf_model, model.tokenizer.tokenizer, PROMPTS, NEW)
    for ids, logits in found:
        assert ids.tolist() == logits.argmax(dim=-1).tolist()
    return [ids.tolist() for ids, _ in found]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return answers()


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 3.0},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(128))},
        {"min_new_tokens": 3, "forced_eos_token_id": 5},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 5.0, "top_k": 9, "top_p": 0.9},
        {"max_length": 3, "max_time": 1e-9},
        {"prompt_lookup_num_tokens": 2, "guidance_scale": 2.0},
        {"an_entry_of_somebody": 1, "bos_token_id": 7},
    ],
    ids=lambda config: next(iter(config)),
)
def test_greedy_ignores_generation_config(config: dict[str, Any], plain: list[list[int]]) -> None:
    assert answers(**config) == plain
