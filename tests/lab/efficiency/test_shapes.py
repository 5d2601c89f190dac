from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from blockattn_rag.lab.efficiency.shapes import (
    SHAPES,
    counting_tokenizer,
    prefill_flops,
    random_llama,
    random_prompt,
    random_text,
)


def test_words_of_the_counting_tokenizer_are_tokens() -> None:
    tokenizer = counting_tokenizer(512)
    text = random_text(20, 512, random.Random(0))
    ids = tokenizer(text)["input_ids"]
    assert [f"t{i}" for i in ids] == text.split()
    assert 0 not in ids


def test_a_random_prompt_has_exactly_the_requested_tokens() -> None:
    prompt = random_prompt(100, 32, 7, 512)
    assert [len(block.text.split()) for block in prompt.context] == [32, 32, 32, 4]
    assert len(prompt.final.split()) == 7
    assert prompt == random_prompt(100, 32, 7, 512)


def test_operations_of_an_8b_model_are_those_of_the_papers() -> None:
    config = SimpleNamespace(**SHAPES["8b"])
    full = prefill_flops(config, 32768 + 50)
    block = prefill_flops(config, 50, 32768)
    assert full == pytest.approx(740e12, rel=0.01)
    assert block == pytest.approx(1.56e12, rel=0.01)
    # Block-Attention, table 3: 99.8 % fewer operations at 32K.
    assert 1 - block / full == pytest.approx(0.998, abs=0.0005)


def test_a_prefill_in_two_steps_costs_as_much_as_in_one() -> None:
    config = SimpleNamespace(**SHAPES["tiny"])
    output_layer = 2 * config.hidden_size * config.vocab_size
    parts = prefill_flops(config, 30) + prefill_flops(config, 12, 30) - output_layer
    assert prefill_flops(config, 42) == parts


def test_unknown_shapes_and_types_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown shape '7b'; known: tiny, 135m, 1b, 8b"):
        random_llama("7b", max_tokens=64)
    with pytest.raises(ValueError, match="floating type"):
        random_llama("tiny", max_tokens=64, dtype="int8")


def test_only_active_experts_are_counted() -> None:
    dense = SimpleNamespace(**SHAPES["tiny"])
    experts = SimpleNamespace(**{**SHAPES["tiny"], "intermediate_size": 32}, num_experts_per_tok=2)
    assert prefill_flops(experts, 10) == prefill_flops(dense, 10)
    small = SimpleNamespace(**SHAPES["tiny"], num_experts_per_tok=4, moe_intermediate_size=16)
    assert prefill_flops(small, 10) == prefill_flops(dense, 10)
