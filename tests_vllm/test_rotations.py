"""Servers with different key rotations than the profile are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import get_rope

from blockattn_rag.errors import ServingError
from blockattn_rag.kv.rope import NO_ROTATION, RotaryLayout
from blockattn_rag.server.profile import LayerProfile, ModelProfile
from blockattn_rag.server.vllm.compatibility import check_rotations
from tests.server.profiles import make_profile

SIZE = 64


@pytest.fixture(autouse=True)
def ropes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """vLLM's registry of rotary modules in this process, initially empty."""
    made: dict[Any, Any] = {}
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", made)
    monkeypatch.setattr("blockattn_rag.server.vllm.compatibility._ROPE_DICT", made)
    with set_current_vllm_config(VllmConfig()):
        yield made


@pytest.fixture
def _kernels() -> Iterator[None]:
    """Let vLLM rotate keys with its own kernels, as with --enforce-eager."""
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    with set_current_vllm_config(config):
        yield


def make(theta: float = 10000.0, size: int = SIZE, *, neox: bool = True, **more: Any) -> None:
    """Create vLLM's rotary module for a layer."""
    parameters = {"rope_type": "default", "rope_theta": theta, **more}
    get_rope(size, 4096, neox, parameters, torch.float32)


def rotary(
    theta: float = 10000.0, dims: int = SIZE, pairing: Any = "half", factor: float = 1.0
) -> RotaryLayout:
    return RotaryLayout(theta ** (-torch.arange(0, dims, 2) / dims) / factor, pairing)


def profile(*layouts: RotaryLayout) -> ModelProfile:
    layers = (LayerProfile(2, SIZE, SIZE, layout, n) for n, layout in enumerate(layouts))
    return replace(make_profile(), layers=tuple(layers))


def test_layers_that_rotate_like_the_profile_are_accepted() -> None:
    make()
    make(1e6)
    make(500.0, 32)  # belongs to another part of the model
    check_rotations(profile(rotary(), rotary(1e6), NO_ROTATION), range(3))
    check_rotations(replace(profile(rotary()), dtype=torch.bfloat16), range(1))


def test_partial_and_interleaved_rotations_are_accepted() -> None:
    make(neox=False)
    make(partial_rotary_factor=0.5)
    check_rotations(profile(rotary(pairing="interleaved"), rotary(dims=SIZE // 2)), range(2))


@pytest.mark.parametrize(
    "other",
    [
        rotary(pairing="interleaved"),
        rotary(10100.0),
        rotary(dims=SIZE // 2),
        rotary(factor=8),
    ],
    ids=["pairs", "frequencies", "dimensions", "scaling"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_different_rotation_is_refused(other: RotaryLayout, dtype: torch.dtype) -> None:
    make()
    wrong = replace(profile(rotary(), other), dtype=dtype)
    check_rotations(wrong, range(1))
    message = r"Layer 1: vLLM rotates keys with RotaryEmbedding \(half pairs of 64.*differs by"
    with pytest.raises(ServingError, match=message):
        check_rotations(wrong, range(2))


def test_a_layer_without_a_module_is_refused() -> None:
    make(size=32)
    with pytest.raises(ServingError, match="Layer 0: vLLM rotates keys with no module, expected"):
        check_rotations(profile(rotary()), range(1))


def test_long_rope_is_checked_by_running_it() -> None:
    config = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=64)  # type: ignore[assignment]
    factors: dict[str, Any] = {"short_factor": [2.0] * 32, "long_factor": [4.0] * 32}
    with set_current_vllm_config(config):
        parameters = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
        get_rope(SIZE, 4096, True, parameters | {"original_max_position_embeddings": 4096})
    check_rotations(profile(rotary(factor=2)), range(1))
    message = r"Phi3LongRoPEScaledRotaryEmbedding \(half pairs of 64, base 10000.0\), which differs"
    with pytest.raises(ServingError, match=message):
        check_rotations(profile(rotary()), range(1))


def test_all_modules_with_the_same_settings_are_checked() -> None:
    make(rope_type="linear", factor=8.0)
    make(rope_type="linear", factor=2.0)
    make(rope_type="linear", factor=4.0)
    check_rotations(profile(*(rotary(factor=factor) for factor in (8, 2, 4))), range(3))


def test_a_model_without_vllms_modules_is_refused_with_the_cause() -> None:
    with pytest.raises(ServingError, match="its transformers backend is not supported"):
        check_rotations(profile(rotary()), range(1))


class Odd(torch.nn.Module):
    """Rotary embedding with a different signature."""

    head_size = SIZE

    def forward(self, positions: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("has_buffer", [True, False])
def test_a_module_that_cannot_be_run_is_reported(ropes: dict[Any, Any], has_buffer: bool) -> None:
    ropes["odd"] = Odd()
    if has_buffer:
        ropes["odd"].register_buffer("table", torch.ones(1))
    with pytest.raises(ServingError, match=r"with Odd \(half pairs .*, which cannot be run \("):
        check_rotations(profile(rotary()), range(1))
    make()
    check_rotations(profile(rotary()), range(1))


def latent_profile(one: RotaryLayout) -> ModelProfile:
    plain = profile(one)
    return replace(plain, layers=(replace(plain.layers[0], is_latent=True),))


def test_latent_keys_may_be_interleaved_in_vllm() -> None:
    make(neox=False)
    with pytest.raises(ServingError, match="interleaved pairs of 64"):
        check_rotations(profile(rotary()), range(1))
    assert check_rotations(latent_profile(rotary()), range(1)) == {0}
    assert check_rotations(latent_profile(rotary(pairing="interleaved")), range(1)) == set()
    with pytest.raises(ServingError, match=r"differs by .*, expected half pairs"):
        check_rotations(latent_profile(rotary(10100.0)), range(1))


def test_latent_keys_of_scaled_positions_are_checked() -> None:
    config = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    make(neox=False, rope_type="deepseek_yarn", original_max_position_embeddings=1024, **config)
    settings = {"rope_type": "yarn", "rope_theta": 10000.0, **config}
    known = LlamaConfig(
        head_dim=SIZE,
        max_position_embeddings=4096,
        rope_parameters={**settings, "original_max_position_embeddings": 1024},
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["yarn"](known)
    assert check_rotations(latent_profile(RotaryLayout(frequencies, "half")), range(1)) == {0}
    with pytest.raises(ServingError, match=r"DeepseekScalingRotaryEmbedding .* differs by"):
        check_rotations(latent_profile(rotary()), range(1))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_kernel_that_rotates_other_elements_of_latent_keys_is_refused(pairing: Any) -> None:
    make(neox=False)
    assert check_rotations(profile(rotary(pairing="interleaved")), range(1)) == set()
    with pytest.raises(ServingError, match=r"Disable the kernel: add .*-rotary_embedding"):
        check_rotations(latent_profile(rotary(pairing=pairing)), range(1))
