from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.bundled_model.base import build_model
from recipes.bundled_model.rows import RowWriter


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model = build_model(tokenizer, seed=0)
    model.set_attn_implementation("eager")
    return model


def attention(model: LlamaForCausalLM, ids: list[int]) -> list[Tensor]:
    """Return the attention weights of layers 0 and 1, ``[heads, queries, keys]``."""
    with torch.no_grad():
        return [layer[0] for layer in model(torch.tensor([ids]), output_attentions=True).attentions]


def test_an_untrained_model_finds_what_followed_a_token(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = RowWriter(tokenizer, random.Random(0)).copy(length=24, gap=0)
    first, second = attention(model, row.ids)[:2]
    assert first[0].diagonal(-1).mean() > 0.6
    again = torch.arange(25, 47)
    # The token at 24 + i also occurs at i; the token to copy is at i + 1.
    assert second[0][again, again - 23].mean() > 0.2


def test_an_untrained_model_finds_what_followed_like_words(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    facts = [
        "The depth of Lake Morwick is",
        "The depth of Lake Yelgil is",
        "The area of Lake Asto is",
    ]
    stated = [f"{fact} {value} feet." for fact, value in zip(facts, (438, 289, 912), strict=True)]
    for number, fact in enumerate(facts):
        before = "Facts: " + " ".join(stated[:number]) + f" {fact}"
        start = len(tokenizer(before).input_ids)
        ids = tokenizer("Facts: " + " ".join(stated) + f"\n{fact} ").input_ids
        weights = attention(model, ids)[1][2, -1]
        # Most of the attention must be on the value of the requested fact.
        assert weights[start : start + 4].sum() > 0.5


def test_every_part_of_a_head_can_still_be_learned(model: LlamaForCausalLM) -> None:
    size = model.config.head_dim
    for layer in model.model.layers:
        attention = layer.self_attn
        queries = attention.q_proj.weight.unflatten(0, (2, 2, size)).abs().amax(dim=(1, 3))
        keys = attention.k_proj.weight.unflatten(0, (2, size)).abs().amax(dim=2)
        # Scores are products of queries and keys: dimensions that are 0 in both get no gradient.
        assert ((queries > 0) | (keys > 0)).all()
        values = attention.v_proj.weight.unflatten(0, (2, size)).abs().amax(dim=2)
        outputs = attention.o_proj.weight.unflatten(1, (2, 2, size)).abs().amax(dim=(0, 2))
        # The same applies to a head's output, a product of values and output weights.
        assert ((values > 0) | (outputs > 0)).all()
