"""Attention probe: measures a model's attention, and rejects models without exact block mode.

Block mode is exact for a model if moving a block does not change its values, and rotates its keys
in a known way. Both are measured when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from blockattn_rag.kv.block_kv import outline
from blockattn_rag.kv.rope import RotaryLayout, fit_layout, fused_rotation, relative_error
from blockattn_rag.model.kinds import (
    LayerKind,
    ProbeError,
    layer_states,
    measured_kinds,
    new_cache,
    refusal,
    seen_attention,
    storing,
)

# Maximum relative error, by dtype, between two computations that are equal in exact arithmetic.
# Rounding errors are far smaller, and wrong computations have errors near 1. Tolerances for 16-bit
# types are wide, because cosine and sine are also rounded, and errors accumulate over layers.
LOGITS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 0.15}
"""Tolerances for logits, for example between relay attention and the copy path."""
LOGITS_OF_OTHER_DTYPES = max(LOGITS.values())
# In float32 and float64, keys and values differ more: the rounding of angles depends on positions.
_STATES = LOGITS | {torch.float64: 1e-3, torch.float32: 1e-3}
_STATES_OF_OTHER_DTYPES = max(_STATES.values())

_PROBE_TOKENS = 8
_PROBE_OFFSETS = (13, 1009)
_UNLIMITED = 1 << 30


class StateOutline(NamedTuple):
    """Number of heads, head size and dtype of one layer's keys or values."""

    heads: int
    size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AttentionProfile:
    """Properties of a model's attention that block mode depends on.

    Args:
        kinds: Kind of each layer.
        layouts: Rotary layout of each layer that stores keys and values. Layers with equal layouts
            share one object.
        max_context_tokens: Maximum combined length of prompt and answer; see ``position_limit``.
        token_outline: ``BlockKV.token_outline`` of the model's blocks.
        key_error, value_error: Maximum relative errors measured by the probe.
    """

    kinds: tuple[LayerKind, ...]
    layouts: tuple[RotaryLayout, ...]
    max_context_tokens: int
    token_outline: tuple[tuple[int, int, torch.dtype], ...]
    key_error: float
    value_error: float

    @property
    def has_windows(self) -> bool:
        return any(kind.window is not None for kind in self.kinds)

    @property
    def has_states(self) -> bool:
        """Whether the model is hybrid: some layers have a recurrent or convolution state."""
        return any(kind.has_state for kind in self.kinds)

    @property
    def layer_outlines(self) -> list[tuple[StateOutline, StateOutline]]:
        """Outlines of the keys and values of each layer that stores them."""
        found = [StateOutline(*one) for one in self.token_outline]
        layers = len(found) // 2  # The keys of all layers come first.
        return list(zip(found[:layers], found[layers:], strict=True))


@torch.inference_mode()
def profile_attention(hf_model: PreTrainedModel) -> AttentionProfile:
    """Measure a model's attention. Raises ``UnsupportedModelError`` with the reason if block mode
    is not exact for the model."""
    if hf_model.config.is_encoder_decoder:
        raise refusal(
            hf_model, "it is an encoder-decoder model, but block mode requires a decoder-only model"
        )
    limit = position_limit(hf_model.config)
    offsets = [o for o in _PROBE_OFFSETS if o + _PROBE_TOKENS <= limit]
    offsets = offsets or [max(1, limit - _PROBE_TOKENS)]
    with seen_attention(hf_model) as seen:
        filled = probe_cache(hf_model)
    kinds = measured_kinds(hf_model, filled, seen)
    home = _states(filled, kinds)
    if any(states.shape[1] != _PROBE_TOKENS for pair in home for states in pair):
        raise refusal(hf_model, "its cache does not have one entry for each token")
    away = [(o, _states(probe_cache(hf_model, o), kinds)) for o in offsets]
    candidates = _frequencies(hf_model)
    tolerance = _STATES.get(hf_model.dtype, _STATES_OF_OTHER_DTYPES)
    _refuse_foresight(hf_model, home, kinds, tolerance)
    fits, value_errors = [], []
    for place, (index, (keys, values)) in enumerate(zip(storing(kinds), home, strict=True)):
        fit = fit_layout(keys, [(o, states[place][0]) for o, states in away], candidates)
        moved = (states[place][1].float() for _, states in away)
        value_error = max(relative_error(one, values.float()) for one in moved)
        if not max(fit.error, value_error) <= tolerance:
            raise refusal(
                hf_model,
                f"in layer {index} ({kinds[index]}), keys at another position differ by "
                f"{fit.error:.2g} from every known rotation, and values differ by "
                f"{value_error:.2g}; expected at most {tolerance:g} from rounding. The position "
                f"embedding is not plain rotary ({len(candidates)} frequency tables tried)",
            )
        fits.append(fit)
        value_errors.append(value_error)
    layouts = [fit.layout for fit in fits]
    if not any(layout.rotates for layout in layouts):
        _refuse_other_positions(hf_model, kinds)
    _check_fused_rotations(layouts, [keys for keys, _ in home])
    return AttentionProfile(
        kinds=tuple(kinds),
        layouts=tuple(next(first for first in layouts if first.same_as(own)) for own in layouts),
        max_context_tokens=limit,
        token_outline=outline([states for pair in zip(*home, strict=True) for states in pair]),
        key_error=max(fit.error for fit in fits),
        value_error=max(value_errors),
    )


def _check_fused_rotations(layouts: Sequence[RotaryLayout], keys: Sequence[Tensor]) -> None:
    """Compare the GPU's fused rotation with PyTorch's, once for each shape and layout of keys."""
    for layout, states in zip(layouts, keys, strict=True):
        if layout.rotates and states.is_cuda:
            kind = states.shape[-1], layout.rotary_dim, layout.pairing
            # Keys of int8 blocks are in float32 until they have been rotated.
            for dtype in (states.dtype, torch.float32):
                fused_rotation(states.device, dtype, states.dtype, *kind)


def position_limit(config: Any) -> int:
    """Maximum context length in tokens, within which RoPE frequencies are constant. Raises
    ``UnsupportedModelError`` for RoPE of the type ``"dynamic"``."""
    config = config.get_text_config(decoder=True)
    limit = int(getattr(config, "max_position_embeddings", 0) or _UNLIMITED)
    settings = getattr(config, "rope_parameters", None) or {}
    # Settings may differ by layer type.
    is_flat = "rope_type" in settings or "rope_theta" in settings
    for rope in (settings,) if is_flat else settings.values():
        if not isinstance(rope, Mapping):
            continue
        kind = rope.get("rope_type", "default")
        if kind == "dynamic":
            raise refusal(
                config,
                "its RoPE type is 'dynamic': the frequencies change with the length of the prompt, "
                "so stored keys would be wrong in other prompts. Load the model with "
                "rope_parameters of a fixed type (default, linear, llama3, yarn)",
            )
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            # The frequencies change beyond this length.
            limit = min(limit, int(original or limit))
    return limit


States = list[tuple[Tensor, Tensor]]
"""Keys and values ``[heads, tokens, size]`` of each layer that stores them."""


def _states(cache: DynamicCache, kinds: Sequence[LayerKind]) -> States:
    return [(keys[0], values[0]) for keys, values in layer_states(cache, kinds)]


def _refuse_foresight(
    hf_model: PreTrainedModel, home: States, kinds: Sequence[LayerKind], tolerance: float
) -> None:
    """Reject a model without causal attention, because padding would change its blocks."""
    half = _PROBE_TOKENS // 2
    parts = _states(probe_cache(hf_model, 0, half), kinds)
    for whole, part in zip(home, parts, strict=True):
        pairs = zip(whole, part, strict=True)
        error = max(relative_error(a[:, :half].float(), b.float()) for a, b in pairs)
        if not error <= tolerance:
            raise refusal(
                hf_model,
                f"its attention is not causal: keys or values change by {error:.2g} when text is "
                "appended. Block mode requires causal attention",
            )


@torch.inference_mode()
def _refuse_other_positions(hf_model: PreTrainedModel, kinds: Sequence[LayerKind]) -> None:
    """Reject a model without rotary positions, unless it has no positions at all.

    In a model without positions, equal tokens have equal keys, and the order of cached tokens has
    no effect. The first check detects positions that are added to embeddings. It does not apply to
    hybrid models, whose states change keys. The second check detects distance biases (ALiBi).
    """
    if not any(kind.has_state for kind in kinds):
        cache = probe_cache(hf_model, repeated=True)
        for keys, _ in layer_states(cache, kinds):
            if not relative_error(keys.float(), keys[:, :, :1].float().expand_as(keys)) <= 0.1:
                raise refusal(hf_model, "it counts positions by itself, and does not rotate keys")
    logits = []
    for order in (range(_PROBE_TOKENS), range(_PROBE_TOKENS)[::-1]):
        cache = probe_cache(hf_model)
        layers: Any = cache.layers
        for layer in layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[:, :, [*order]], layer.values[:, :, [*order]]
        ids = torch.tensor([[1]], device=hf_model.device)
        logits.append(hf_model(input_ids=ids, past_key_values=cache, use_cache=True)[0].float())
    if not relative_error(*logits) <= LOGITS.get(hf_model.dtype, LOGITS_OF_OTHER_DTYPES):
        raise refusal(
            hf_model,
            "no layer rotates its keys, and the order of earlier tokens matters, so the model uses "
            "other position embeddings (such as ALiBi), which this package does not support",
        )


def probe_cache(
    hf_model: PreTrainedModel,
    offset: int = 0,
    tokens: int = _PROBE_TOKENS,
    *,
    repeated: bool = False,
) -> DynamicCache:
    """Run a forward pass over fixed probe tokens at ``offset``, and return its cache. ``repeated``:
    Whether all tokens are equal. Raises ``ProbeError`` if the model cannot run the probe."""
    check_ready(hf_model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary_size(hf_model), (1, _PROBE_TOKENS), generator=generator)
    ids = (ids[:, :1].expand_as(ids) if repeated else ids)[:, :tokens].to(hf_model.device)
    positions = torch.arange(offset, offset + tokens, device=hf_model.device)[None]
    try:
        cache = new_cache(hf_model.config)
        hf_model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"it fails on {tokens} tokens at position {offset}: {error}"
        raise refusal(hf_model, reason, ProbeError) from error
    return cache


def check_ready(hf_model: PreTrainedModel) -> None:
    """Raise ``ValueError`` in training mode and under autocast, which change keys and values
    without changing the fingerprint."""
    if hf_model.training:
        raise ValueError(
            f"{type(hf_model).__name__} is in training mode, in which keys and values are random "
            "(dropout) or missing (gradient checkpointing). Call its eval() method first"
        )
    kind = hf_model.device.type
    if torch.is_autocast_enabled(kind):
        precision = torch.get_autocast_dtype(kind)
        raise ValueError(
            f"Autocast to {precision} is enabled, but keys and values must be computed in the "
            f"model's dtype {hf_model.dtype}: leave the torch.autocast context, or load the model "
            f"with dtype={precision}"
        )


def vocabulary_size(hf_model: PreTrainedModel) -> int:
    embeddings: Any = hf_model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def _frequencies(hf_model: PreTrainedModel) -> list[Tensor]:
    """Return the distinct RoPE frequency tables of a model, from its buffers or its config."""
    tables: list[Tensor] = []
    config: Any = hf_model.config.get_text_config(decoder=True)
    if size := getattr(config, "rotary_dim", None):
        # GPT-J stores cos and sin instead of frequencies.
        tables.append(10000.0 ** (-torch.arange(0, size, 2) / size))
    for name, buffer in hf_model.named_buffers():
        if name.endswith("inv_freq") and buffer.dim() == 1:
            # Copy the table, because the model may overwrite it after blocks have been stored.
            table = buffer.detach().float().cpu().clone()
            if not any(torch.equal(known, table) for known in tables):
                tables += [table, -table]  # Some models rotate backwards.
    return tables
