"""Profiles that are measured from a config, without the weights."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model import miniature
from blockattn_rag.model.miniature import profile_config
from blockattn_rag.model.probe import profile_attention
from tests.model.families import KINDS, SUPPORTED
from tests.model.miniatures import model_of_kinds
from tests.models import tiny_model

ALL_LAYERS = 80
LARGE: dict[str, tuple[str, dict[str, Any], list[tuple[int, int]]]] = {
    "llama": (
        "llama",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": ALL_LAYERS,
         "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
        [(8, 128)] * ALL_LAYERS,
    ),
    "size of heads from the width": (
        "gpt_neox",
        {"hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44},
        [(64, 96)] * 44,
    ),
    "no size of heads in the config": (
        "qwen2",
        {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
         "num_hidden_layers": 28},
        [(4, 128)] * 28,
    ),
    "one head of keys": ("falcon", {"multi_query": True, "alibi": False}, [(1, 64)] * 32),
    "experts": ("gpt_oss", {"num_hidden_layers": 24}, [(8, 64)] * 24),
    "sizes by kind of layer": (
        "gemma3_text",
        {"hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16,
         "head_dim": 128, "num_hidden_layers": 62},
        [(16, 128)] * 62,
    ),
    "latent": ("deepseek_v3", {"num_hidden_layers": 61}, [(1, 64)] * 61),
    "shared layers": ("gemma3n_text", {}, [(2, 256)] * 20),
    "shared layers and sizes by layer": (
        "gemma4_text",
        {"num_hidden_layers": 35, "num_kv_shared_layers": 20, "num_key_value_heads": 1,
         "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7},
        [*[(1, 256)] * 4, (1, 512)] * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_profile_of_a_config_equals_that_of_the_model(name: str) -> None:
    family, settings = SUPPORTED[name]
    model = tiny_model(family, **settings)
    expected, found = profile_attention(model), profile_config(model.config, torch.float32)
    assert found.kinds == expected.kinds
    assert found.token_outline == expected.token_outline
    assert found.max_context_tokens == expected.max_context_tokens
    for layout, own in zip(found.layouts, expected.layouts, strict=True):
        assert layout.same_as(own)


@pytest.mark.parametrize("name", LARGE)
def test_profiles_of_large_models_have_their_sizes(name: str) -> None:
    family, settings, outlines = LARGE[name]
    profile = profile_config(AutoConfig.for_model(family, **settings), torch.bfloat16)
    assert [(keys.heads, keys.size) for keys, _ in profile.layer_outlines] == outlines
    assert {dtype for _, _, dtype in profile.token_outline} == {torch.bfloat16}


@pytest.mark.parametrize("name", KINDS)
def test_profiles_of_other_kinds_equal_those_of_the_model(name: str) -> None:
    family, settings, _ = KINDS[name]
    profile = profile_config(AutoConfig.for_model(family, **settings), torch.float32)
    expected, found = model_of_kinds(name).profile.kinds, profile.kinds
    assert {(k.attention, k.has_state) for k in found} == {
        (k.attention, k.has_state) for k in expected
    }


def test_model_without_rotation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        profile_config(AutoConfig.for_model("bloom"), torch.float32)


def test_unmeasurable_model_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miniature, "_built", Mock(side_effect=RuntimeError("the cause")))
    with pytest.raises(UnsupportedModelError, match=r"measured without its weights .*the cause"):
        profile_config(AutoConfig.for_model("llama"), torch.float32)


def test_config_without_head_size_is_refused() -> None:
    config = AutoConfig.for_model("llama")
    config.head_dim, config.num_attention_heads = None, 0
    with pytest.raises(UnsupportedModelError, match="lacks the head size"):
        profile_config(config, torch.float32)
