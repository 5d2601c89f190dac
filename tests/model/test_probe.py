"""The probe that measures a model when it is loaded."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model.kinds import PLAIN
from blockattn_rag.model.probe import position_limit, profile_attention
from tests.model.families import LONGROPE_LIMIT, SUPPORTED
from tests.models import shared_tiny_llama, tiny_model


def test_layers_that_rotate_alike_share_one_layout() -> None:
    profile = profile_attention(shared_tiny_llama())
    assert len(profile.layouts) == 3
    assert len({id(layout) for layout in profile.layouts}) == 1
    assert (profile.layouts[0].pairing, profile.layouts[0].rotary_dim) == ("half", 8)
    assert profile.kinds == (PLAIN,) * 3
    assert profile.max_context_tokens == 4096
    # float32 rounding of keys at position 1009: 1009 * 6e-8 rad, plus the rounding of sums.
    assert profile.key_error < 1e-4
    assert profile.value_error < 1e-5


@pytest.mark.parametrize(
    ("family", "pairing", "rotary_dim"),
    [("glm", "interleaved", 4), ("cohere", "interleaved", 8), ("gpt_neox", "half", 2)],
)
def test_pairing_and_width_are_detected(family: str, pairing: str, rotary_dim: int) -> None:
    kind, config = SUPPORTED[family]
    (layout, *_) = profile_attention(tiny_model(kind, **config)).layouts
    assert (layout.pairing, layout.rotary_dim) == (pairing, rotary_dim)


def test_each_kind_of_layer_has_its_own_layout_and_window() -> None:
    kind, config = SUPPORTED["gemma3"]
    profile = profile_attention(tiny_model(kind, **config))
    assert [kind.window for kind in profile.kinds] == [16, 16, 16, 16, 16, None, 16]
    sliding, full = profile.layouts[0], profile.layouts[5]
    assert not sliding.same_as(full)
    assert all(layout is sliding for layout in (*profile.layouts[:5], profile.layouts[6]))


def test_layers_without_positions_are_detected() -> None:
    kind, config = SUPPORTED["smollm3"]
    profile = profile_attention(tiny_model(kind, **config))
    assert [layout.rotates for layout in profile.layouts] == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_measured_too(dtype: torch.dtype) -> None:
    model: Any = copy.deepcopy(shared_tiny_llama()).to(dtype)  # type: ignore[arg-type]
    assert profile_attention(model).layouts[0].rotary_dim == 8


def test_models_with_hidden_frequencies_are_refused() -> None:
    model = copy.deepcopy(shared_tiny_llama())
    inner = model.model.rotary_emb
    inner.hidden = inner.inv_freq * 1.5  # used, but not a buffer
    forward = inner.forward

    def other(*args: object, **kwargs: object) -> object:
        shown, inner.inv_freq = inner.inv_freq, inner.hidden
        result = forward(*args, **kwargs)
        inner.inv_freq = shown
        return result

    inner.forward = other
    with pytest.raises(UnsupportedModelError, match=r"differ by .* from every known rotation"):
        profile_attention(model)


def test_the_context_limit_is_where_frequencies_change() -> None:
    kind, config = SUPPORTED["phi3, longrope"]
    assert position_limit(tiny_model(kind, **config).config) == LONGROPE_LIMIT
    assert position_limit(tiny_model("llama", max_position_embeddings=77).config) == 77


def test_context_windows_shorter_than_the_probe_are_supported() -> None:
    assert profile_attention(tiny_model(max_position_embeddings=12)).max_context_tokens == 12


def test_outlines_pair_the_keys_and_values_of_each_layer() -> None:
    profile = profile_attention(tiny_model())
    sizes = [(2, 8), (4, 8), (2, 6), (4, 6)]  # keys of two layers, then their values
    outline = tuple((heads, size, torch.float32) for heads, size in sizes)
    (keys, values), (more_keys, more_values) = replace(
        profile, token_outline=outline
    ).layer_outlines
    assert (keys.heads, keys.size, values.heads, values.size) == (2, 8, 2, 6)
    assert (more_keys.heads, more_keys.size, more_values.size) == (4, 8, 6)
    for (of_keys, of_values), (heads, size, _) in zip(
        profile.layer_outlines, profile.token_outline, strict=False
    ):
        assert (of_keys.heads, of_values.size) == (heads, size)
