"""Startup checks that block mode gives exact answers on an engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    UniformTypeKVCacheSpecs,
)

from blockattn_rag.errors import ServingError
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.profile import ModelProfile

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("blockattn_rag")

_LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "runai_streamer")
"""Formats that load the weights of the checkpoint's files, unchanged."""


def check_engine(
    engine: VllmConfig, cache: KVCacheConfig, config: ServingConfig, profile: ModelProfile
) -> None:
    """Check that this engine gives exact answers in block mode."""
    found = [*_transfer(engine), *_parallel(engine, config), *_model(engine, profile)]
    found += [*_cache(engine, cache, config)]
    if found:
        raise ServingError("Block mode is not possible on this engine: " + "; ".join(found))
    speculative = engine.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        logger.warning(
            "Speculative decoding by %s: its draft layers get no keys and values of the blocks, "
            "so fewer draft tokens are accepted; answers are not affected",
            speculative.method,
        )


def _transfer(engine: VllmConfig) -> Iterator[str]:
    transfer = engine.kv_transfer_config
    parent = get_current_vllm_config_or_none()
    of_all = parent.kv_transfer_config if parent is not None else None
    if transfer is None or (of_all is not None and of_all.kv_connector == "MultiConnector"):
        yield (
            "the connector is one of several (MultiConnector), and others may mix pages of block "
            "mode with those of full mode; make it the only one"
        )
        return
    if transfer.kv_load_failure_policy != "fail":
        yield (
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, which mixes block and "
            "full mode in an answer when a block is lost; set it to 'fail'"
        )
    if not transfer.is_kv_consumer:
        yield f"kv_role is {transfer.kv_role!r}, which loads nothing; set it to 'kv_both'"


def _parallel(engine: VllmConfig, config: ServingConfig) -> Iterator[str]:
    parallel = engine.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name} is {getattr(parallel, name)}: tokens are split over ranks; set it to 1"
    if parallel.pipeline_parallel_size > 1 and not config.read_only:
        yield (
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: no rank has all layers "
            "of a block to store; set read_only, and encode on another server"
        )


def _model(engine: VllmConfig, profile: ModelProfile) -> Iterator[str]:
    model = engine.model_config
    if model.use_mla:
        yield "the model has latent attention (MLA), whose cache contains no keys"
    in_checkpoint = getattr(model.hf_config, "quantization_config", None)
    if model.quantization is not None and in_checkpoint is None:
        yield (
            f"quantization is {model.quantization!r}, which changes the weights while they are "
            "loaded, so that their files do not identify them; serve a quantized checkpoint"
        )
    if (found := engine.load_config.load_format) not in _LOAD_FORMATS:
        yield (
            f"load_format is {found!r}, whose weights are not those of the checkpoint's files; set "
            "--load-format auto"
        )
    text = model.hf_text_config
    for name, expected in (
        ("num_hidden_layers", profile.num_layers),
        ("vocab_size", profile.vocab_size),
    ):
        if getattr(text, name, expected) != expected:
            yield (
                f"the engine's model has {name} {getattr(text, name)}, but the config of "
                f"{profile.name} says {expected}; remove --hf-overrides"
            )
    if model.max_model_len > profile.max_positions:
        yield (
            f"max_model_len is {model.max_model_len}, but the model's keys are exact only for "
            f"{profile.max_positions} positions; set --max-model-len {profile.max_positions}"
        )


def _cache(engine: VllmConfig, cache: KVCacheConfig, config: ServingConfig) -> Iterator[str]:
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec | UniformTypeKVCacheSpecs):
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        yield (
            f"the cache has {len(specs)} groups ({kinds}), expected one that keeps all tokens; set "
            "--disable-hybrid-kv-cache-manager, or use a model without recurrent layers and with "
            "at least one layer without a sliding window"
        )
    dtype = engine.cache_config.cache_dtype
    as_computed = ("auto", str(engine.model_config.dtype).removeprefix("torch."))
    if dtype not in as_computed and config.encodes:
        yield (
            f"the cache stores {dtype}, but blocks are saved as the model computes them; set "
            "--kv-cache-dtype auto, or read_only and private_memory '0', and encode on another "
            "server"
        )
