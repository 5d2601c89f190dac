"""The profile of a model tells what the model itself knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.server.measured_profile import profile_of
from blockattn_rag.server.profile import ModelProfile
from tests.models import VOCABULARY, shared_tiny_llama, tiny_model, tiny_tokenizer


def encoded_outlines(model: BlockModel) -> Iterator[tuple[int, int, int]]:
    """Heads, key size and value size of each layer of a block that the model encodes."""
    [[kv]] = model.encode([EncodeRequest([1, 2, 3], "digest", "handle")])
    for keys, values in zip(kv.keys, kv.values, strict=True):
        yield keys.shape[0], keys.shape[2], values.shape[2]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "smollm3", "glm"])
def test_a_profile_tells_shapes_and_rotations_of_what_the_model_encodes(family: str) -> None:
    layers = {"smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4}}.get(family, {})
    model = BlockModel(tiny_model(family, **layers), tiny_tokenizer())
    profile = ModelProfile.from_dict(profile_of(model).to_dict())
    assert profile.fingerprint == model.fingerprint
    assert profile.tokenizer == model.tokenizer.fingerprint
    assert [layer[:3] for layer in profile.layers] == [*encoded_outlines(model)]
    for told, known in zip(profile.layouts, model.profile.layouts, strict=True):
        assert told.same_as(known)
    assert len(profile.rotary) == len({id(layout) for layout in model.profile.layouts})
    assert profile.torch_dtype == torch.float32
    assert (profile.vocab_size, profile.max_positions) == (VOCABULARY, 4096)
    assert profile.bytes_per_token == model.bytes_per_token
    assert not profile.block_tuned


def test_a_profile_tells_the_sink_and_its_tokens() -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    profile = profile_of(model, "head:4")
    assert (profile.sink, [*profile.sink_ids]) == ("head:4", sink_ids("head:4", model.tokenizer))
    assert len(profile.sink_ids) == 4


def test_an_unknown_sink_is_refused() -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    with pytest.raises(ValueError, match="'head:N'"):
        profile_of(model, "first-block")


def test_a_rare_number_type_is_refused() -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    model.fingerprint  # noqa: B018 - measures the model; what follows pretends that it saw more
    model.profile = replace(model.profile, token_outline=((2, 8, torch.float8_e4m3fn),) * 6)
    with pytest.raises(UnsupportedModelError, match=r"float8_e4m3fn, expected one of float32"):
        profile_of(model)
