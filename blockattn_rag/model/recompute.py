"""Recomputation: the passage tokens that matter most to the question get full attention.

Block mode encodes each passage independently. Recomputation selects the tokens that the question
attends to most in the last third of the layers (``measured_layers``), and recomputes them with
attention to everything before them. The other tokens keep their keys and values. This takes two
more forward passes: one over the question, to measure attention, and one over the chosen tokens.
CacheBlend (arXiv 2405.16444) also recomputes tokens; ProphetKV and QCFuse also select tokens by the
question. ``benchmarks/results/quality`` compares selection methods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, PlacedBlock
from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.caches import ContextCache, copied_cache, isolated_caches
from blockattn_rag.model.checkpoint import CheckpointModel
from blockattn_rag.model.chosen_attention import ChosenAttention, MeasuredAttention
from blockattn_rag.model.encoding import logits_to_keep
from blockattn_rag.model.probe import check_ready
from blockattn_rag.model.relay_attention import (
    OTHER_ATTENTION,
    enable_relay,
    last_logits,
    layer_windows,
)


def tokens_to_recompute(lengths: Sequence[int], may_change: Sequence[bool], share: float) -> int:
    """Number of tokens that ``recompute`` recomputes: ``share`` of the tokens in the context blocks
    that may change. It does not depend on the question."""
    return round(share * sum(compress(lengths, may_change)))


@torch.no_grad()
def recompute(
    model: BlockModel,
    context: Context,
    may_change: Sequence[bool],
    final_ids: Sequence[int],
    share: float,
) -> tuple[Context, list[int]]:
    """Recompute tokens of a context for one question.

    Args:
        model: Model that passes ``check_can_recompute``. The caller must hold its lock.
        context: The context, with reordered positions.
        may_change: Whether the tokens of each block may be chosen. True only for passages after the
            prompt's first block, because nothing precedes the first block.
        final_ids: Token ids of the final block, which contains the question.
        share: Share to recompute of the tokens that may be chosen, from 0 to 1.

    Returns:
        The context as a single block, and the sorted indices of the recomputed tokens in it. If the
        share rounds to 0 tokens: the unchanged context and no indices.
    """
    check_ready(model.hf_model)
    count = tokens_to_recompute(context.lengths, may_change, share)
    if not count:
        return context, []
    cache = _copied(model, context)
    received = attention_to_context(model, context, final_ids, cache)
    chosen = choose_tokens(received, context.lengths, may_change, count)
    return with_recomputed(model, context, chosen, cache), chosen


@torch.no_grad()
def with_recomputed(
    model: BlockModel, context: Context, chosen: Sequence[int], cache: ContextCache | None = None
) -> Context:
    """Recompute the chosen tokens (sorted), and return the context as a single block.

    ``cache``: A copied cache of the context that keeps all tokens. It must not be used afterwards.
    """
    if cache is None:
        cache = _copied(model, context)
    ids = context.token_ids
    places = torch.tensor(chosen, device=model.device)
    layers: Any = cache.layers
    kinds = model.profile.kinds
    cache.layers = [
        _ReplacingLayer(layer.keys, layer.values, places) if kind.stores else layer
        for layer, kind in zip(layers, kinds, strict=True)
    ]
    windows, has_kernel = layer_windows(kinds), model.has_causal_kernel
    cache.attention = ChosenAttention(chosen, places, windows, has_causal_kernel=has_kernel)
    with torch.inference_mode(), isolated_caches():
        model.hf_model(
            input_ids=torch.tensor([[ids[place] for place in chosen]], device=model.device),
            position_ids=places[None],
            past_key_values=cache,
            use_cache=True,
            **logits_to_keep(model.hf_model),
        )
    identity = [block.kv.digest for block in context.blocks], [*chosen]
    keys, values = [], []
    layers = cache.layers
    for kind in kinds:
        # Copy tensors without their free space, one layer at a time to save memory.
        layer = layers.pop(0)
        if kind.stores:
            keys.append(layer.keys[0].clone())
            values.append(layer.values[0].clone())
    kv = BlockKV(
        keys=tuple(keys),
        values=tuple(values),
        token_ids=torch.tensor(ids),
        fingerprint=context.blocks[0].kv.fingerprint,
        digest=hashlib.sha256(repr(identity).encode()).hexdigest(),
        handle="",
    )
    return Context((PlacedBlock(kv, 0, 0),))


def _copied(model: BlockModel, context: Context) -> ContextCache:
    config, profile = model.hf_model.config, model.profile
    return copied_cache(config, [context], profile.layouts, profile.kinds, keeps_all=True)


def choose_tokens(
    received: Tensor, lengths: Sequence[int], may_change: Sequence[bool], count: int
) -> list[int]:
    """Sorted indices of the ``count`` allowed tokens that receive the most attention.

    Args:
        received: Attention that each context token receives, ``[tokens]`` float32.
        lengths: Number of tokens of each context block.
        may_change: Whether the tokens of each block may be chosen.
    """
    tokens = torch.tensor(lengths, dtype=torch.int64)
    allowed = torch.tensor(may_change).repeat_interleave(tokens).to(received.device)
    # Not `topk`, because its choice among equal scores differs between devices.
    ranked = received.masked_fill(~allowed, -1.0).sort(descending=True, stable=True).indices
    return sorted(ranked[:count].tolist())


def can_recompute(model: BlockModel | CheckpointModel) -> bool:
    """Whether a model can recompute tokens.

    In process, relay attention must support all layers, and no layer may have latents or a state.
    In vLLM, each layer must attend to its own keys and values without a window, because vLLM keeps
    no pages outside of windows, and positions must not be multimodal (M-RoPE)."""
    kinds = model.profile.kinds
    if isinstance(model, CheckpointModel):
        config: Any = model.config.get_text_config(decoder=True)
        rotary = getattr(config, "rope_parameters", None) or {}
        # In older transformers releases, `kinds` lacks the layers that share keys and values.
        has_all_layers = len(kinds) == config.num_hidden_layers
        is_plain = has_all_layers and all(k.is_attention and k.window is None for k in kinds)
        return is_plain and "mrope_section" not in rotary
    has_latents = any(kind.attention == "latent" for kind in kinds)
    return not (has_latents or model.profile.has_states) and model.supports_relay


def check_can_recompute(model: BlockModel | CheckpointModel) -> None:
    if model.profile.has_states:
        raise UnsupportedModelError(
            f"{model.name} cannot recompute tokens, because the state layers of hybrid models "
            "process tokens in sequence: use a recipe with recompute=0, for example promote=1"
        )
    if not can_recompute(model):
        is_served = isinstance(model, CheckpointModel)
        windows = "sliding windows, multimodal positions, " if is_served else ""
        raise UnsupportedModelError(
            f"{model.name} cannot recompute tokens here, because it has {windows}multi-head latent "
            f"attention, or {OTHER_ATTENTION}: use a recipe with recompute=0"
        )


def attention_to_context(
    model: BlockModel,
    context: Context,
    final_ids: Sequence[int],
    cache: ContextCache | None = None,
    layers: Collection[int] | None = None,
) -> Tensor:
    """Measure the attention of the final block to each context token.

    Returns ``[tokens]``, float32: summed over ``layers`` (default: ``measured_layers``), averaged
    over heads and the final block's tokens. ``cache``: Copied cache of the context that keeps all
    tokens. It is unchanged afterwards.
    """
    if cache is None:
        cache = _copied(model, context)
    enable_relay(model.hf_model)
    windows = layer_windows(model.profile.kinds)
    layers = measured_layers(windows) if layers is None else layers
    before, after = context.num_tokens, len(final_ids)
    scores = MeasuredAttention(before, after, windows, layers, model.device)
    cache.attention = scores
    ids = torch.tensor([[*final_ids]])
    last_logits(model.hf_model, ids, cache, 1, computes_all=True)
    cache.attention = None
    cache.crop(-len(final_ids))
    return scores.total


def measured_layers(windows: Mapping[int, int | None]) -> list[int]:
    """Return the last third of the layers without sliding windows, because most passages lie
    outside a window. If all layers have windows, return the last third of all layers."""
    layers = [layer for layer, window in windows.items() if window is None] or [*windows]
    return layers[2 * len(layers) // 3 :]


class _ReplacingLayer(DynamicLayer):
    """Cache layer in which a forward pass replaces the keys and values at ``places``."""

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self._places = keys, values, places

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self._places, key_states)
        self.values.index_copy_(2, self._places, value_states)
        return self.keys, self.values
