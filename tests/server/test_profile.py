"""Profiles of loaded models, and of checkpoints whose weights are not loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.rope import NO_ROTATION
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.checkpoint import CheckpointModel
from blockattn_rag.model.recompute import can_recompute
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.profile import LayerProfile, profile_of
from tests.models import VOCABULARY, save_model, shared_tiny_llama, tiny_model, tiny_tokenizer
from tests.recipes import recipe_of
from tests.server.profiles import make_profile

SHARED: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}


def test_a_profile_computes_bytes() -> None:
    layers = LayerProfile(2, 8, 6, NO_ROTATION, 0), LayerProfile(1, 8, 8, NO_ROTATION, 2)
    profile = replace(make_profile(dtype=torch.bfloat16), layers=layers)
    assert profile.bytes_per_token == 2 * (2 * (8 + 6) + 1 * (8 + 8))
    assert profile.block_bytes(5) == 5 * profile.bytes_per_token
    scales = 2 * (8 + 5) + 1 * (8 + 5)  # per head: one per key channel and token
    assert profile.block_bytes(5, "int8") == 5 * profile.bytes_per_token // 2 + 4 * scales


# -- profiles of models ----------------------------------------------------------------------------


def encoded_outlines(model: BlockModel) -> Iterator[tuple[int, int, int]]:
    """Return heads, key size and value size of each layer, from a block encoded by the model."""
    [[kv]] = model.encode([EncodeRequest([1, 2, 3], "digest", "handle")])
    for keys, values in zip(kv.keys, kv.values, strict=True):
        yield keys.shape[0], keys.shape[2], values.shape[2]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "smollm3", "glm"])
def test_a_profile_has_the_shapes_and_rotations_of_encoded_blocks(family: str) -> None:
    layers = {"smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4}}.get(family, {})
    model = BlockModel(tiny_model(family, **layers), tiny_tokenizer())
    profile = profile_of(model)
    assert profile.fingerprint == model.fingerprint
    assert profile.tokenizer == model.tokenizer.fingerprint
    assert [(layer.kv_heads, layer.key_size, layer.value_size) for layer in profile.layers] == [
        *encoded_outlines(model)
    ]
    assert [layer.layout for layer in profile.layers] == [*model.profile.layouts]
    assert profile.dtype == torch.float32
    assert (profile.vocab_size, profile.max_positions) == (VOCABULARY, 4096)
    assert profile.bytes_per_token == model.bytes_per_token
    assert not profile.block_tuned


def test_layers_with_shared_keys_and_values_are_counted() -> None:
    model = BlockModel(tiny_model("gemma4_text", **SHARED), tiny_tokenizer())
    listed = profile_of(model)
    assert (listed.hidden_layers, len(listed.layers)) == (5, 3)
    # transformers 5.19 omits them from its caches.
    other = BlockModel(tiny_model("gemma4_text", **SHARED), tiny_tokenizer())
    other.profile = replace(other.profile, kinds=other.profile.kinds[:3])
    assert profile_of(other) == listed


def test_models_with_shared_layers_cannot_recompute_on_servers(tmp_path: Path) -> None:
    """This holds even if all listed layers have full attention."""
    full = {**SHARED, "layer_types": ["full_attention"] * 5, "global_head_dim": 8}
    save_model(tiny_model("gemma4_text", **full), tmp_path)
    model = CheckpointModel(tmp_path, torch.float32)
    assert not can_recompute(model)
    model.profile = replace(model.profile, kinds=model.profile.kinds[:3])
    assert not can_recompute(model)


def test_a_profile_has_the_sink_and_its_tokens() -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    profile = profile_of(model, Recipe("head:4"))
    assert [*profile.sink_ids] == sink_ids("head:4", model.tokenizer)
    assert len(profile.sink_ids) == 4
    assert profile.recipe == Recipe("head:4").outline


def test_a_profile_counts_the_tokens_to_recompute() -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    recipe = Recipe("head:4", recompute=0.5)
    profile = profile_of(model, recipe)
    assert profile.recipe == recipe.outline
    plan = BlockPlan("complete", (5, 10, 20, 40))
    assert profile.recomputed_tokens(plan) == 35  # all blocks except the first
    assert profile.recomputed_tokens(replace(plan, fixed=(1, 3))) == 10
    assert profile_of(model).recomputed_tokens(plan) == 0


def test_unsupported_recipes_are_refused() -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    other = BlockModel(tiny_model("llama", num_hidden_layers=1), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"belongs to .* with the fingerprint"):
        profile_of(model, recipe_of(other))
    with pytest.raises(
        ValueError, match="Recipe positions:composite is not supported, because a server"
    ):
        profile_of(model, Recipe(positions="composite"))


def test_unsupported_dtypes_are_refused() -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    model.fingerprint  # noqa: B018 - measures the model; what follows pretends that it saw more
    model.profile = replace(model.profile, token_outline=((2, 8, torch.float8_e4m3fn),) * 6)
    with pytest.raises(UnsupportedModelError, match=r"float8_e4m3fn, expected one of float32"):
        profile_of(model)


# -- profiles of checkpoints -----------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKATTN_RAG_HOME", str(tmp_path / "home"))
    return save_model(tiny_model("gemma3_text", num_hidden_layers=7), tmp_path / "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_and_loaded_model_have_the_same_profile(saved: Path, dtype: torch.dtype) -> None:
    model = BlockModel.from_pretrained(saved, device="cpu", dtype=dtype)
    recipe = recipe_of(model)
    found, expected = profile_of(CheckpointModel(saved, dtype), recipe), profile_of(model, recipe)
    assert found == expected
    for layer, known in zip(found.layers, expected.layers, strict=True):
        assert layer.layout.same_as(known.layout)


def test_checkpoint_weights_are_not_loaded(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=AssertionError("loaded"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    assert len(profile_of(CheckpointModel(saved, torch.float32)).layers) == 7


def test_the_bundled_model_has_the_same_fingerprint_as_a_checkpoint() -> None:
    model = BlockModel.from_pretrained("bundled", device="cpu", dtype="float32")
    assert profile_of(CheckpointModel("bundled", torch.float32)) == profile_of(model)


@pytest.mark.parametrize("file", ["model.safetensors", "adapter_config.json"])
def test_a_checkpoint_that_cannot_be_served_is_refused(saved: Path, file: str) -> None:
    path = saved / file
    path.unlink() if path.exists() else path.write_text('{"base_model_name_or_path": "x"}')
    with pytest.raises(UnsupportedModelError, match=r"has no weight files|merge it into its base"):
        profile_of(CheckpointModel(saved, torch.float32))


def test_a_checkpoint_with_other_layers_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=4, vocab_size=264)
    save_model(config, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"a recurrent state \(3 state, 1 attention\)"):
        profile_of(CheckpointModel(tmp_path, torch.float32))
