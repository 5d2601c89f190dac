"""Startup checks that block mode gives exact answers on an engine.

vLLM's attention layers have no reference to the module that rotates their keys. vLLM stores these
modules, one per layout, in ``_ROPE_DICT``. The check of rotations runs them on random keys at three
positions. It cannot detect swapped layouts, because vLLM does not record a layer's module.

The keys of latent attention are views of a wider tensor, with a dimension for their single head.
vLLM's CPU kernel, ``rotary_embedding`` in ``csrc/cpu/pos_encoding.cpp``, uses the stride of that
dimension to step between tokens, and so rotates the wrong elements. The check therefore passes
these keys in the same layout as the layer does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader.weight_utils import filter_files_not_needed_for_inference
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from blockattn_rag.errors import ServingError
from blockattn_rag.kv.rope import RotaryLayout, relative_error, shift_positions
from blockattn_rag.model.loading import commit_of, load_config, weight_files
from blockattn_rag.model.quantized import quantization_of
from blockattn_rag.server.config import NOT_RECOMPUTING, ServingConfig, as_computed
from blockattn_rag.server.profile import LayerProfile, ModelProfile

logger = logging.getLogger("blockattn_rag")

_SPECS = (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec)
"""Cache specs of layers that store every token, or every token in a window."""
_LOAD_FORMATS = ("auto", "hf", "safetensors")
"""Formats that load the weights in the checkpoint's files unchanged."""
_MISTRAL = "consolidated"
"""Name prefix of files that vLLM prefers to the hashed files if the load format is ``auto``."""
_NOT_RECOMPUTED = "tokens cannot be recomputed; use a recipe with recompute=0, such as 'fast'"

_OFFSETS = (13, 1009)
_TOKENS = 4
_TOLERANCE, _TOLERANCE_OF_16_BITS = 1e-3, 3e-2
"""Tolerated relative errors of rotated keys. Wrong frequencies cause errors near 1."""


def check_engine(
    engine: VllmConfig, cache: KVCacheConfig, config: ServingConfig, profile: ModelProfile
) -> None:
    reasons = [*_transfer(engine), *_parallel(engine, config), *_model(engine, profile)]
    reasons += [*_weights(engine), *_cache(engine, cache, config)]
    if profile.recipe.recompute:
        reasons += [f"{reason}, so {_NOT_RECOMPUTED}" for reason in _recomputation(engine)]
    if reasons:
        raise ServingError("Block mode is not supported on this engine: " + "; ".join(reasons))
    speculative = engine.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        logger.warning(
            "Speculative decoding with %s: the draft layers do not receive the blocks' keys and "
            "values, so fewer draft tokens are accepted; answers are not affected",
            speculative.method,
        )


def _transfer(engine: VllmConfig) -> Iterator[str]:
    transfer = engine.kv_transfer_config
    parent = get_current_vllm_config_or_none()
    of_all = parent.kv_transfer_config if parent is not None else None
    if transfer is None or (of_all is not None and of_all.kv_connector == "MultiConnector"):
        yield (
            "the connector is one of several (MultiConnector), and the others may mix block-mode "
            "and full-mode pages; make it the only one"
        )
        return
    if transfer.kv_load_failure_policy != "fail":
        yield (
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, which would mix block "
            "and full mode in an answer if a block is lost; set it to 'fail'"
        )
    if not transfer.is_kv_consumer:
        yield f"kv_role is {transfer.kv_role!r}, which loads no blocks; set it to 'kv_both'"


def _parallel(engine: VllmConfig, config: ServingConfig) -> Iterator[str]:
    parallel = engine.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name} is {getattr(parallel, name)}: tokens are split over ranks; set it to 1"
    if parallel.pipeline_parallel_size > 1 and not config.read_only:
        yield (
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: no rank has all layers "
            "of a block, so none can store it; set read_only, and encode on another server"
        )


def _model(engine: VllmConfig, profile: ModelProfile) -> Iterator[str]:
    model = engine.model_config
    for name in ("hf_overrides", "model_class_overrides"):
        if value := getattr(model, name, None):
            option = name.replace("_", "-")
            yield (
                f"{name} is {value!r}, which may change keys and values without changing the "
                "fingerprint; change the config in the model's folder instead, and remove "
                f"--{option}"
            )
    if model.hf_config_path not in (None, model.model):
        yield (
            f"hf_config_path is {model.hf_config_path!r}, but the fingerprint was computed from "
            "the model's own config; remove --hf-config-path"
        )
    text = model.hf_text_config
    for name, expected in (
        ("num_hidden_layers", profile.hidden_layers),
        ("vocab_size", profile.vocab_size),
    ):
        if getattr(text, name, expected) != expected:
            yield (
                f"the engine's model has {name} {getattr(text, name)}, but the config of "
                f"{profile.name} has {expected}; report this model"
            )
    if model.max_model_len > profile.max_positions:
        yield (
            f"max_model_len is {model.max_model_len}, but the model's keys are exact only for "
            f"{profile.max_positions} positions; set --max-model-len {profile.max_positions}"
        )


def _recomputation(engine: VllmConfig) -> Iterator[str]:
    """Yield the reasons why the connector's forward pass cannot recompute tokens."""
    model, parallel = engine.model_config, engine.parallel_config
    yield from (
        f"{option} is in use" for option, is_used in NOT_RECOMPUTING.items() if is_used(engine)
    )
    if parallel.data_parallel_size > 1 and model.is_moe:
        yield f"data_parallel_size is {parallel.data_parallel_size} for a mixture of experts"
    if model.uses_mrope:
        yield "the model has multimodal rotary positions (M-RoPE)"


def _weights(engine: VllmConfig) -> Iterator[str]:
    """Yield the reasons why vLLM would load weights that differ from the hashed files."""
    model, load = engine.model_config, engine.load_config
    commit = commit_of(model.model, model.revision)
    if model.quantization and not quantization_of(load_config(model.model, revision=commit)):
        yield (
            f"quantization is {model.quantization!r}, which changes the weights while they are "
            "loaded, so that the files' hashes do not identify them; serve a quantized checkpoint "
            "instead"
        )
    if load.load_format not in _LOAD_FORMATS:
        yield (
            f"load_format is {load.load_format!r}, which may load weights other than those in "
            "the checkpoint's files; set --load-format auto"
        )
        return
    if load.download_dir is not None and commit is not None:
        yield (
            f"download_dir is {load.download_dir!r}, but the hashed files are in the hub's cache; "
            "set the environment variable HF_HUB_CACHE instead"
        )
        return
    if (hashed := weight_files(model.model, commit)) is None:
        return  # No profile can be built from this folder.
    names = {path.name for path in hashed.folder.glob("*.safetensors")}
    if load.load_format == "auto" and any(name.startswith(_MISTRAL) for name in names):
        yield (
            f"{hashed.folder} contains {_MISTRAL}*.safetensors, which vLLM would load instead of "
            f"{', '.join(hashed.names)}; set --load-format safetensors"
        )
        return
    if names and hashed.index is not None:
        names &= {*hashed.names}  # vLLM skips files that the index does not list.
    if not names:
        files = [path.name for path in hashed.folder.glob("*.bin")]
        names = {*filter_files_not_needed_for_inference(files)}
    if names != {*hashed.names}:
        yield (
            f"vLLM would load {', '.join(sorted(names))} in {hashed.folder}, but transformers "
            f"loads {', '.join(hashed.names)}; remove the other files"
        )


def _cache(engine: VllmConfig, cache: KVCacheConfig, config: ServingConfig) -> Iterator[str]:
    specs: list[KVCacheSpec] = []
    for group in cache.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            specs += group.kv_cache_spec.kv_cache_specs.values()
        else:
            specs.append(group.kv_cache_spec)
    if others := {type(spec).__name__ for spec in specs if type(spec) not in _SPECS}:
        yield (
            f"the cache has layers of {', '.join(sorted(others))}, expected "
            f"{', '.join(spec.__name__ for spec in _SPECS)}; use another model"
        )
    dtype = engine.cache_config.cache_dtype
    if dtype not in as_computed(engine) and config.encodes:
        yield (
            f"the cache stores {dtype}, but blocks are saved in the model's dtype; set "
            "--kv-cache-dtype auto, or read_only and private_memory '0', and encode on another "
            "server"
        )


def check_rotations(profile: ModelProfile, layers: Iterable[int]) -> set[int]:
    """Check that vLLM has a matching rotary embedding for each of the profile's ``layers``. Returns
    the indices of latent layers whose keys use the half-split (NeoX-style) layout in transformers
    and the interleaved (GPT-J-style) layout in vLLM."""
    checked: dict[tuple[int, RotaryLayout], bool] = {}
    interleaved = set()
    for index in layers:
        layer = profile.layers[index]
        kind = layer.key_size, layer.layout
        if kind not in checked:
            checked[kind] = layer.layout.rotates and _is_interleaved(layer, profile)
        if checked[kind]:
            interleaved.add(index)
    return interleaved


def _is_interleaved(layer: LayerProfile, profile: ModelProfile) -> bool:
    """Whether vLLM, unlike the profile, interleaves the pairs of a latent layer's keys."""
    layout = layer.layout
    layouts = [layout]
    if layer.is_latent and layout.pairing == "half" and layout.rotary_dim == layer.key_size:
        layouts.append(replace(layout, pairing="interleaved"))
    if not _ROPE_DICT:
        raise ServingError(
            f"Layer {layer.index}: vLLM has no rotary embeddings of its own for {profile.name}, so "
            "the rotation of keys cannot be checked; its transformers backend is not supported: "
            "remove --model-impl, or use a model that vLLM implements natively"
        )
    tolerance = _TOLERANCE if profile.dtype.itemsize > 2 else _TOLERANCE_OF_16_BITS
    others, flat_only = [], []
    for rope in _ROPE_DICT.values():
        if getattr(rope, "head_size", layer.key_size) != layer.key_size:
            continue
        try:
            errors = [_error(rope, one, layer, profile) for one in layouts]
        except (AttributeError, TypeError, StopIteration) as cause:  # The signature differs.
            others.append(f"{_shown(rope)}, which cannot be run ({cause!r})")
            continue
        if min(errors) <= tolerance:
            return errors.index(min(errors)) > 0
        if layer.is_latent and _error_of_flat_keys(rope, layouts, layer, profile) <= tolerance:
            flat_only.append(_shown(rope))
        others.append(f"{_shown(rope)}, which differs by {errors[0]:.2g}")
    if flat_only:
        raise ServingError(
            f"Layer {layer.index}: {' and '.join(flat_only)} rotates the wrong elements of the "
            "keys of latent attention (MLA), because vLLM's CPU kernel expects keys without a head "
            "dimension. Disable the kernel: add --compilation-config "
            """'{"custom_ops": ["-rotary_embedding"]}'"""
        )
    raise ServingError(
        f"Layer {layer.index}: vLLM rotates keys with {'; '.join(others) or 'no module'}, expected "
        f"{layout.pairing} pairs of {layout.rotary_dim} dimensions with frequencies from "
        f"{layout.frequencies.max():.4g} to {layout.frequencies.min():.4g}, as in the config of "
        f"{profile.name}; report this model"
    )


def _error_of_flat_keys(
    rope: Any, layouts: Sequence[RotaryLayout], layer: LayerProfile, profile: ModelProfile
) -> float:
    """Return the smallest error for keys without a head dimension, or infinity on failure."""
    flat = replace(layer, is_latent=False)
    try:
        return min(_error(rope, layout, flat, profile) for layout in layouts)
    except RuntimeError:  # The module requires a head dimension.
        return math.inf


def _error(rope: Any, layout: RotaryLayout, layer: LayerProfile, profile: ModelProfile) -> float:
    """Return the largest relative error of vLLM's module, compared with rotation by ``layout``."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(_TOKENS, layer.key_size, generator=generator).to(profile.dtype)
    limit = profile.max_positions - 1
    offsets = {min(offset, limit) for offset in _OFFSETS}
    at_zero, *rotated = [
        _rotated(rope, keys, offset, is_latent=layer.is_latent).float() for offset in (0, *offsets)
    ]
    return max(
        relative_error(shift_positions(at_zero[None], offset, layout)[0], keys)
        for offset, keys in zip(offsets, rotated, strict=True)
    )


@torch.inference_mode()
def _rotated(rope: Any, keys: Tensor, position: int, *, is_latent: bool) -> Tensor:
    """Rotate keys ``[tokens, head_size]`` to one position with ``rope``. Returns CPU tensors."""
    device = next(rope.buffers()).device
    positions = torch.full((len(keys),), position, dtype=torch.int64, device=device)
    # Copy, because vLLM's kernels modify their arguments.
    query, copy = (keys.to(device, copy=True) for _ in range(2))
    if is_latent:  # ``[tokens, 1, head_size]``, as views of the wider projection.
        # The order of these calls determines the stride of the head dimension.
        query, copy = (
            torch.cat([torch.zeros_like(one), one], dim=-1)[:, one.shape[-1] :].unsqueeze(1)
            for one in (query, copy)
        )
    _, rotated = rope(positions, query, copy)
    return torch.as_tensor(rotated).reshape(keys.shape).cpu()


def _shown(rope: Any) -> str:
    neox = getattr(rope, "is_neox_style", True)  # Other classes support only this style.
    pairs = "half" if neox else "interleaved"
    dims, base = (getattr(rope, name, "unknown") for name in ("rotary_dim", "base"))
    return f"{type(rope).__name__} ({pairs} pairs of {dims}, base {base})"
