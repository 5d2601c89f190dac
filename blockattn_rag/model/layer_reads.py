"""Block tensors that each layer of a model reads, and the layer's sliding window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from blockattn_rag.attention.latent import LatentMap
from blockattn_rag.attention.relay import LayerReads
from blockattn_rag.model.kinds import LayerKind, in_order, new_cache, seen_attention, storing
from blockattn_rag.model.probe import AttentionProfile, check_ready
from blockattn_rag.model.relay_attention import last_logits


def layer_windows(kinds: Sequence[LayerKind]) -> dict[int, int | None]:
    """Sliding window of each layer with attention, in tokens. None: no window."""
    return {layer: window for layer, (_, window, _) in _reads(kinds, {}).items()}


def _reads(kinds: Sequence[LayerKind], latents: Mapping[int, LatentMap]) -> dict[int, LayerReads]:
    """Block tensors that each layer reads, for layers that attend to keys and values or known
    latents."""
    places = {layer: place for place, layer in enumerate(storing(kinds))}
    reads = {}
    for index, kind in enumerate(kinds):
        source = index if kind.source is None else kind.source
        if kinds[source].is_attention or source in latents:
            window = kinds[source].window
            reads[index] = LayerReads(places[source], window, latents.get(source))
    return reads


def measured_reads(hf_model: PreTrainedModel, profile: AttentionProfile) -> dict[int, LayerReads]:
    """Block tensors that each layer reads, by layer index. Omits layers without attention, and
    layers that relay attention does not support."""
    return _reads(profile.kinds, _latent_maps(hf_model, profile))


def _latent_maps(hf_model: PreTrainedModel, profile: AttentionProfile) -> dict[int, LatentMap]:
    """Linear maps of latent layers, measured by passing unit vectors through them."""
    kinds = profile.kinds
    outlines = dict(zip(storing(kinds), profile.layer_outlines, strict=True))
    ranks = {
        index: latents.size
        for index, (_, latents) in outlines.items()
        if kinds[index].attention == "latent" and not kinds[index].has_state
    }
    if not ranks:
        return {}
    check_ready(hf_model)
    cache, tokens = new_cache(hf_model.config), max(ranks.values())
    for index, outline in outlines.items():
        keys, values = (
            torch.zeros(1, heads, tokens, size, dtype=dtype, device=hf_model.device)
            for heads, size, dtype in outline
        )
        if index in ranks:
            values.diagonal(dim1=2, dim2=3).fill_(1)
        cache.update(*in_order(kinds[index], keys, values), index)
    with seen_attention(hf_model) as seen:
        last_logits(hf_model, torch.zeros(1, 1, dtype=torch.long), cache, 1)
    maps = {}
    for index, rank in ranks.items():
        if index in seen:
            rotary = outlines[index][0].size
            keys, values = (states[0, :, :rank] for states in seen[index][:2])
            maps[index] = LatentMap(keys[..., :-rotary].clone(), values.clone())
    return maps
