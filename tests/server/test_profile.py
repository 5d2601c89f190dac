"""Profiles: read as they were written, and refused with a reason where they are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import ProtocolError, ServingError, UnsupportedModelError
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.server.profile import LayerProfile, ModelProfile, Rotary, profile_of
from tests.models import VOCABULARY, shared_tiny_llama, tiny_model, tiny_tokenizer
from tests.recipes import recipe_of
from tests.server.profiles import SINK_IDS, make_profile

PROFILE = make_profile(sink_ids=SINK_IDS, vocab_size=1000)


def changed(**fields: Any) -> dict[str, Any]:
    """What the profile tells, with other fields."""
    return json.loads(json.dumps(PROFILE.to_dict())) | fields  # type: ignore[no-any-return]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=4),
    st.sampled_from(["half", "interleaved"]),
)
def test_profile_survives_json_bit_by_bit(frequencies: list[float], pairing: Any) -> None:
    profile = ModelProfile(
        fingerprint="0" * 64,
        tokenizer="1" * 64,
        name="a name\nof two lines",
        dtype="bfloat16",
        layers=(LayerProfile(2, 8, 6, 1), LayerProfile(1, 8, 8, 0)),
        rotary=(Rotary("half", ()), Rotary(pairing, tuple(frequencies))),
        vocab_size=10,
        max_positions=20,
    )
    again = ModelProfile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert again == profile
    rotating, still = again.layouts
    assert (rotating.pairing, rotating.rotates) == (pairing, bool(frequencies))
    assert torch.equal(rotating.frequencies, torch.tensor(frequencies, dtype=torch.float32))
    assert not still.rotates
    assert again.bytes_per_token == 2 * (2 * (8 + 6) + 1 * (8 + 8))
    assert again.block_bytes(5) == 5 * again.bytes_per_token
    scales = 2 * (8 + 5) + 1 * (8 + 5)  # of each head: one for a channel of keys, and for a token
    assert again.block_bytes(5, "int8") == 5 * again.bytes_per_token // 2 + 4 * scales


def test_a_file_holds_a_profile(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "model.json")
    assert ModelProfile.read(tmp_path / "model.json") == PROFILE
    assert PROFILE.torch_dtype == torch.float32
    assert PROFILE.num_layers == 2


@pytest.mark.parametrize("content", [None, b"", b"[" * 10**5, b"{}", b"\xff", b'{"version": 2}'])
def test_a_file_that_holds_none_says_how_to_make_one(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServingError, match=r"model.json: .*check MODEL --profile") as caught:
        ModelProfile.read(path)
    assert "None" not in str(caught.value).replace("Found version None", "")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": 2}, "Found version 2 of a profile, expected 1"),
        ({"windows": []}, "profile has the unknown field 'windows'"),
        ({"fingerprint": "F" * 64}, "fingerprint should match pattern"),
        ({"dtype": "int8"}, "dtype should match pattern .*float32"),
        ({"layers": []}, "layers should have at least 1 item"),
        ({"layers": [[2, 4, 4, 0]]}, r"layers\[0\] should be an object"),
        ({"rotary": [{"pairing": "half"}]}, r"rotary\[0\] has no field 'frequencies'"),
        ({"rotary": [{"pairing": "both", "frequencies": []}]}, r"pairing should be 'half' or"),
        ({"rotary": [{"pairing": "half", "frequencies": [0.1]}]}, "float32 numbers"),
        ({"rotary": [{"pairing": "half", "frequencies": [float("inf")]}]}, "finite"),
        ({"rotary": [{"pairing": "half", "frequencies": [1.0] * 3}]}, "found 3 frequencies"),
        ({"vocab_size": 0}, "vocab_size should be greater than or equal to 1"),
        ({"sink": "head 2"}, "sink should match pattern"),
        ({"sink": "none"}, "found sink='none' and 2 sink_ids, which disagree"),
        ({"sink_ids": []}, "found sink='head:2' and 0 sink_ids"),
        ({"sink_ids": [1000, 1]}, "expected less than 1000"),
        ({"adapter": "a"}, "adapter should match pattern"),
    ],
)
def test_what_is_no_profile_is_refused_with_a_reason(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        ModelProfile.from_dict(changed(**fields))


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("kv_heads", 0, r"layers\[1\].kv_heads should be greater than or equal to 1"),
        ("key_size", True, "key_size should be a valid integer"),
        ("rotary", 1, "found rotary 1, expected less than 1"),
    ],
)
def test_a_layer_s_numbers_are_within_bounds(field: str, value: object, why: str) -> None:
    told = changed()
    told["layers"][1][field] = value
    with pytest.raises(ProtocolError, match=why):
        ModelProfile.from_dict(told)


def test_a_profile_lacks_no_field() -> None:
    for name in changed().keys() - {"adapter", "promote", "block_tuned"}:
        told = changed()
        del told[name]
        with pytest.raises(ProtocolError):
            ModelProfile.from_dict(told)


# -- profiles of models ----------------------------------------------------------------------------


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
    assert [(layer.kv_heads, layer.key_size, layer.value_size) for layer in profile.layers] == [
        *encoded_outlines(model)
    ]
    for told, known in zip(profile.layouts, model.profile.layouts, strict=True):
        assert told.same_as(known)
    assert len(profile.rotary) == len({id(layout) for layout in model.profile.layouts})
    assert profile.torch_dtype == torch.float32
    assert (profile.vocab_size, profile.max_positions) == (VOCABULARY, 4096)
    assert profile.bytes_per_token == model.bytes_per_token
    assert not profile.block_tuned


def test_a_profile_tells_the_sink_and_its_tokens() -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    profile = profile_of(model, Recipe("head:4"))
    assert (profile.sink, [*profile.sink_ids]) == ("head:4", sink_ids("head:4", model.tokenizer))
    assert len(profile.sink_ids) == 4
    assert profile.recipe == Recipe("head:4").outline


def test_a_recipe_of_another_model_or_that_no_server_applies_has_no_profile() -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    other = BlockModel(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"belongs to .* with the fingerprint"):
        profile_of(model, recipe_of(other))
    with pytest.raises(ValueError, match="Found recipe positions:composite, but a server rotates"):
        profile_of(model, Recipe(positions="composite"))
    with pytest.raises(ValueError, match=r"recipe recompute:0.1, but a server .*promote=1"):
        profile_of(model, Recipe(recompute=0.1))


@pytest.mark.parametrize(
    ("changed_recipe", "why"),
    [
        ({"sink": "bos"}, "found bos, expected head:4.adapter"),
        ({"adapter": None}, "found head:4, expected head:4.adapter"),
        ({"promote": 1}, "promote:1, expected head:4.adapter"),
        ({"positions": "composite"}, "adapter:.......positions:composite, expected"),
        ({"fingerprints": ("0" * 64,)}, "found fingerprints .'000"),
    ],
)
def test_other_recipe_is_refused(changed_recipe: dict[str, Any], why: str) -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    recipe = recipe_of(model)
    profile = ModelProfile.from_dict(profile_of(model, recipe).to_dict())
    profile.check_recipe(recipe)
    fields = {"adapter": recipe.adapter, **changed_recipe}
    if "sink" in changed_recipe:
        fields["adapter"] = None
    with pytest.raises(ServingError, match=why):
        profile.check_recipe(replace(recipe, **fields))
    fewer = replace(profile, layers=profile.layers[:-1])
    with pytest.raises(ServingError, match="correction has 3 layers, expected 2 for this model"):
        fewer.check_recipe(recipe)


def test_a_rare_number_type_is_refused() -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    model.fingerprint  # noqa: B018 - measures the model; what follows pretends that it saw more
    model.profile = replace(model.profile, token_outline=((2, 8, torch.float8_e4m3fn),) * 6)
    with pytest.raises(UnsupportedModelError, match=r"float8_e4m3fn, expected one of float32"):
        profile_of(model)
