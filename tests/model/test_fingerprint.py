"""The fingerprint: content, not name, and all that changes keys and values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from blockattn_rag.model.fingerprint import Identity
from blockattn_rag.model.weights import weights_digest
from blockattn_rag.prompts.tokenization import BlockTokenizer
from tests.models import shared_tiny_llama, tiny_model, tiny_tokenizer

TOKENIZER = BlockTokenizer(tiny_tokenizer())


@pytest.fixture
def model() -> PreTrainedModel:
    return copy.deepcopy(shared_tiny_llama())


def fingerprint(model: PreTrainedModel) -> str:
    return Identity(model, TOKENIZER).fingerprint


ORIGINAL = fingerprint(shared_tiny_llama())


def test_a_copy_under_another_name_has_the_same_fingerprint(model: PreTrainedModel) -> None:
    model.config._name_or_path = "another/name"
    model.config.block_attention = {"note": "says who trained it"}
    model.config.eos_token_id = 3
    assert fingerprint(model) == ORIGINAL
    assert len(ORIGINAL) == 64


def test_another_dtype_has_another_fingerprint(model: PreTrainedModel) -> None:
    assert fingerprint(model.bfloat16()) != ORIGINAL


def test_weights_that_are_swapped_have_another_fingerprint(model: PreTrainedModel) -> None:
    layers = model.model.layers
    layers[0].self_attn, layers[1].self_attn = layers[1].self_attn, layers[0].self_attn
    assert fingerprint(model) != ORIGINAL


@torch.no_grad()
def test_one_bit_of_one_weight_changes_the_fingerprint(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    assert fingerprint(model) != ORIGINAL


def test_buffers_count(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq[0] *= 2
    assert fingerprint(model) != ORIGINAL


def test_settings_that_change_keys_and_values_count(model: PreTrainedModel) -> None:
    model.config.rms_norm_eps = 1e-3
    assert fingerprint(model) != ORIGINAL


def test_another_tokenizer_has_another_fingerprint(model: PreTrainedModel) -> None:
    other = BlockTokenizer(tiny_tokenizer(bos=False))
    assert Identity(model, other).fingerprint != ORIGINAL


def test_another_seed_has_another_digest_and_the_same_seed_the_same() -> None:
    assert weights_digest(tiny_model()) == weights_digest(shared_tiny_llama())
    assert weights_digest(tiny_model(seed=1)) != weights_digest(shared_tiny_llama())


def test_tied_weights_and_empty_ones_are_read(model: PreTrainedModel) -> None:
    tied = tiny_model(tie_word_embeddings=True)
    assert weights_digest(tied) != weights_digest(model)
    before = weights_digest(model)
    model.register_buffer("nothing", torch.empty(0))
    assert weights_digest(model) != before


def test_a_merged_adapter_has_another_fingerprint(model: PreTrainedModel) -> None:
    config = LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False)
    merged: Any = get_peft_model(model, config).merge_and_unload()
    assert fingerprint(merged) != ORIGINAL
