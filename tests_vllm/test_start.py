"""Engines with which block mode would be incorrect are refused at startup."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.errors import ServingError
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.vllm.compatibility import check_engine
from tests_vllm.engines import Engine
from tests_vllm.reference import MODEL, Reference
from tests_vllm.tiny import save

FULL = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32)
SLIDING = SlidingWindowSpec(
    block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64
)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
STATE = MambaSpec(block_size=128, shapes=((4, 4),), dtypes=(torch.float32,))
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32, attention_chunk_size=64
)


def engine_of(transfer: dict[str, Any] | None = None, **changed: Any) -> VllmConfig:
    given = {
        "kv_connector": "BlockAttentionConnector",
        "kv_connector_module_path": "blockattn_rag.server.vllm.connector",
        "kv_role": "kv_both",
    }
    args = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024} | changed
    config = KVTransferConfig(**(given | (transfer or {})))
    return EngineArgs(model=MODEL, kv_transfer_config=config, **args).create_engine_config()


def cache_of(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec) for spec in specs]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def check(reference: Reference, engine: Any, *specs: Any, **options: Any) -> None:
    config = ServingConfig.parse(reference.options(**options))
    check_engine(engine, cache_of(*specs or (FULL,)), config, reference.profile)


def change(engine: Any, changed: dict[str, Any]) -> None:
    """Set nested options of an engine, given by their dotted names."""
    for place, value in changed.items():
        *part, name = place.split(".")
        setattr(getattr(engine, part[0]) if part else engine, name, value)


@pytest.mark.parametrize(
    ("transfer", "changed", "message"),
    [
        ({"kv_load_failure_policy": "recompute"}, {}, "kv_load_failure_policy is 'recompute'"),
        ({"kv_role": "kv_producer"}, {}, "kv_role is 'kv_producer'"),
        ({}, {"model_config.quantization": "fp8"}, "serve a quantized checkpoint"),
        ({}, {"model_config.hf_overrides": {"rope_theta": 5}}, "remove --hf-overrides"),
        ({}, {"model_config.hf_overrides": str}, "remove --hf-overrides"),
        ({}, {"model_config.hf_config_path": "/other"}, "remove --hf-config-path"),
        ({}, {"load_config.load_format": "dummy"}, "set --load-format auto"),
        ({}, {"load_config.load_format": "npcache"}, "set --load-format auto"),
        ({}, {"parallel_config.decode_context_parallel_size": 2}, "context_parallel_size is 2"),
        ({}, {"parallel_config.pipeline_parallel_size": 2}, "no rank has all layers"),
        ({}, {"model_config.max_model_len": 100_000}, "set --max-model-len"),
        ({}, {"cache_config.cache_dtype": "fp8_e4m3"}, "the cache stores fp8_e4m3"),
    ],
)
def test_unsuitable_engines_are_refused(
    reference: Reference, transfer: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    engine = engine_of(transfer)
    change(engine, changed)
    with pytest.raises(ServingError, match=message):
        check(reference, engine)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parallel_config.pipeline_parallel_size": 2}, "--pipeline-parallel-size is in use"),
        ({"lora_config": object()}, "--enable-lora is in use"),
        ({"cache_config.cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype is in use"),
    ],
)
def test_engines_that_cannot_recompute_are_refused_if_the_recipe_does(
    reference: Reference, changed: dict[str, Any], message: str
) -> None:
    config = ServingConfig.parse(reference.options(read_only=True, private_memory="0"))
    engine, cache = engine_of(), cache_of(FULL)
    profile = replace(reference.profile, recipe=RecipeOutline("none", recompute=0.1))
    check_engine(engine, cache, config, profile)
    change(engine, changed)
    check_engine(engine, cache, config, reference.profile)
    with pytest.raises(ServingError, match=f"{message}, so tokens cannot be recomputed.*'fast'"):
        check_engine(engine, cache, config, profile)


@pytest.mark.parametrize(
    ("name", "load_format", "message"),
    [
        ("consolidated", "auto", r"contains consolidated\*.*--load-format safetensors"),
        ("consolidated", "safetensors", "would load consolidated.*, model.safetensors in"),
        ("adapter", "auto", "would load adapter.safetensors, model.safetensors in"),
    ],
)
def test_other_weights_in_the_folder_are_refused(
    reference: Reference, tmp_path: Path, name: str, load_format: str, message: str
) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    engine = engine_of()
    change(engine, {"model_config.model": str(folder), "load_config.load_format": load_format})
    check(reference, engine)
    shutil.copy(folder / "model.safetensors", folder / f"{name}.safetensors")
    with pytest.raises(ServingError, match=message):
        check(reference, engine)


def test_files_that_the_index_does_not_list_are_not_loaded(
    reference: Reference, tmp_path: Path
) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"all": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "consolidated.safetensors").touch()
    engine = engine_of()
    change(engine, {"model_config.model": str(folder), "load_config.load_format": "safetensors"})
    check(reference, engine)


def test_read_only_servers_have_fewer_requirements(reference: Reference) -> None:
    engine = engine_of()
    engine.parallel_config.pipeline_parallel_size = 2
    engine.cache_config.cache_dtype = "fp8_e4m3"
    check(reference, engine, read_only=True, private_memory="0")
    with pytest.raises(ServingError, match="read_only and private_memory '0'"):
        check(reference, engine, read_only=True)


@pytest.mark.parametrize(
    "specs", [(FULL, SLIDING), (SLIDING, FULL, SLIDING), (SLIDING,), (LATENT,)]
)
def test_groups_of_attention_layers_are_accepted(
    reference: Reference, specs: tuple[Any, ...]
) -> None:
    check(reference, engine_of(), *specs)
    uniform = UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs={"a": specs[0]})
    check(reference, engine_of(), uniform)


@pytest.mark.parametrize("specs", [(FULL, STATE), (CHUNKED,)])
def test_other_kinds_of_layers_are_refused(reference: Reference, specs: tuple[Any, ...]) -> None:
    with pytest.raises(ServingError, match=f"the cache has layers of {type(specs[-1]).__name__}"):
        check(reference, engine_of(), *specs)


def test_a_model_that_differs_from_the_profile_is_refused(reference: Reference) -> None:
    config = ServingConfig.parse(reference.options())
    other = replace(reference.profile, vocab_size=5000)
    with pytest.raises(ServingError, match="vocab_size 1202"):
        check_engine(engine_of(), cache_of(FULL), config, other)


def test_a_connector_combined_with_others_is_refused(reference: Reference) -> None:
    engine = engine_of()
    parent = engine_of({"kv_connector": "MultiConnector", "kv_connector_module_path": None})
    with set_current_vllm_config(parent), pytest.raises(ServingError, match="make it the only one"):
        check(reference, engine)


def test_an_engine_with_another_key_rotation_does_not_start(
    reference: Reference, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="Engine core initialization failed"):
        Engine(reference.options(), module="tests_vllm.connectors", name="RotatedConnector")
    message = "Layer 0: vLLM rotates keys with RotaryEmbedding (half pairs of 64, base"
    assert message in "".join(capfd.readouterr())


def test_latents_that_vllm_expands_to_all_heads_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expanded = Reference(tmp_path, str(save("expanded", tmp_path / "model")))
    with pytest.raises(RuntimeError, match="Engine core initialization failed"):
        Engine(expanded.options(), model=expanded.name)
    assert "but vLLM stores keys and values of all heads" in "".join(capfd.readouterr())
