"""Attention probe: measures a model's attention, and refuses models without exact block mode.

Block mode is exact for a model if moving a block leaves its values unchanged and rotates its keys
in a known way. Both are measured once, when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.block_kv import outline
from blockattn_rag.kv.rope import (
    LayoutFit,
    RotaryLayout,
    fit_layout,
    fused_rotation,
    relative_error,
)

# Maximum relative error, by dtype, between two computations that are equal in exact arithmetic.
# Rounding errors are far smaller, and wrong computations have errors near 1. Tolerances of 16-bit
# types are wide, because cosine and sine are also rounded, and errors add up over layers.
LOGITS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 0.15}
"""Tolerances of logits: block mode vs. the oracle, and relay vs. copy."""
# Tolerances of keys and values. Wider, because rotation angles round differently by position.
_STATES = LOGITS | {torch.float64: 1e-3, torch.float32: 1e-3}
_STATES_OF_OTHER_DTYPES = max(_STATES.values())

_PROBE_TOKENS = 8
_PROBE_OFFSETS = (13, 1009)
_UNLIMITED = 1 << 30


class StateOutline(NamedTuple):
    """Heads, head size and dtype of one layer's keys or values."""

    heads: int
    size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AttentionProfile:
    """Properties of a model's attention that block mode depends on.

    Args:
        layouts: Rotary layout per layer. Layers with equal layouts share one object.
        windows: Sliding window per layer, in tokens. None: full attention.
        max_context_tokens: Maximum length of prompt and answer for which positions are exact.
        token_outline: ``BlockKV.token_outline`` of this model's blocks.
        key_error, value_error: Largest relative errors that the probe measured.
    """

    layouts: tuple[RotaryLayout, ...]
    windows: tuple[int | None, ...]
    max_context_tokens: int
    token_outline: tuple[tuple[int, int, torch.dtype], ...]
    key_error: float
    value_error: float

    @property
    def layer_outlines(self) -> list[tuple[StateOutline, StateOutline]]:
        """Outlines of each layer's keys and values."""
        found = [StateOutline(*one) for one in self.token_outline]
        layers = len(found) // 2  # the keys of all layers come first
        return list(zip(found[:layers], found[layers:], strict=True))


def profile_attention(hf_model: PreTrainedModel) -> AttentionProfile:
    """Measure a model's attention.

    Raises:
        UnsupportedModelError: block mode would change this model's answers; the message says why.
    """
    windows = _layer_windows(hf_model)
    limit = position_limit(hf_model.config)
    home, fits, value_error = _measure(hf_model, len(windows), limit)
    if not any(fit.layout.rotates for fit in fits):
        raise _refusal(
            hf_model,
            "no layer rotates its keys, so the model uses other position embeddings (such as "
            "ALiBi), which this package does not support",
        )
    layouts = [fit.layout for fit in fits]
    _check_fused_rotations(layouts, [keys for keys, _ in home])
    return AttentionProfile(
        layouts=tuple(next(first for first in layouts if first.same_as(own)) for own in layouts),
        windows=windows,
        max_context_tokens=limit,
        token_outline=outline([states for pair in zip(*home, strict=True) for states in pair]),
        key_error=max(fit.error for fit in fits),
        value_error=value_error,
    )


def _check_fused_rotations(layouts: Sequence[RotaryLayout], keys: Sequence[Tensor]) -> None:
    """Compare the rotation that a GPU uses with PyTorch's, once for each kind of keys.

    Raises:
        UnsupportedModelError: they differ.
    """
    for layout, states in zip(layouts, keys, strict=True):
        if layout.rotates and states.is_cuda:
            kind = states.shape[-1], layout.rotary_dim, layout.pairing
            # Keys of int8 blocks are in float32 until they have been rotated.
            for dtype in (states.dtype, torch.float32):
                fused_rotation(states.device, dtype, states.dtype, *kind)


def _layer_windows(hf_model: PreTrainedModel) -> tuple[int | None, ...]:
    """Sliding window per layer, read from the cache that transformers creates for the config."""
    config = hf_model.config
    if config.is_encoder_decoder:
        raise _refusal(
            hf_model, "it is an encoder-decoder model, but only decoders can be split into blocks"
        )
    windows: list[int | None] = []
    layers = DynamicCache(config=config).layers
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or [""] * len(layers)
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=False)):
        if "chunked" in kind:
            raise _refusal(
                hf_model,
                f"the attention of layer {index} is chunked: a token attends only to its own "
                "chunk, so its keys and values change when its block moves",
            )
        if type(layer) is DynamicLayer:
            windows.append(None)
        elif type(layer) is DynamicSlidingWindowLayer:
            windows.append(layer.sliding_window)
        else:
            raise _refusal(
                hf_model,
                f"layer {index} caches its state in a {type(layer).__name__}, but only full and "
                "sliding-window attention are supported; recurrent, linear and KV-sharing layers "
                "are not",
            )
    if not windows:
        raise _refusal(hf_model, "it has no attention layer with a KV cache")
    return tuple(windows)


def position_limit(config: Any) -> int:
    """Maximum context length, in tokens, with constant RoPE frequencies. Read from the config."""
    config = config.get_text_config(decoder=True)
    limit = int(getattr(config, "max_position_embeddings", 0) or _UNLIMITED)
    for rope in _rope_parameters(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type", "default")
        if kind == "dynamic":
            raise _refusal(
                config,
                "its RoPE type is 'dynamic': the frequencies change with the length of the prompt, "
                "so stored keys would be wrong in other prompts. Load the model with "
                "rope_parameters of a fixed type (default, linear, llama3, yarn)",
            )
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            # The frequencies are constant up to this length, and change beyond it.
            limit = min(limit, int(original or limit))
    return limit


def _rope_parameters(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """All RoPE settings of a config. Some models have one per layer type."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters or "rope_theta" in parameters:
        yield parameters
    else:
        yield from (p for p in parameters.values() if isinstance(p, Mapping))


@torch.inference_mode()
def _measure(
    hf_model: PreTrainedModel, num_layers: int, limit: int
) -> tuple[list[tuple[Tensor, Tensor]], list[LayoutFit], float]:
    """Fit each layer's rotary layout on a short random probe.

    Also checks that values do not depend on positions.

    Returns:
        Keys and values of the probe, the fit of each layer, and the largest error of values.
    """
    offsets = [o for o in _PROBE_OFFSETS if o + _PROBE_TOKENS <= limit]
    offsets = offsets or [max(1, limit - _PROBE_TOKENS)]
    home = probe_states(hf_model)
    if len(home) != num_layers:
        raise _refusal(hf_model, f"only {len(home)} of {num_layers} layers fill the KV cache")
    away = [(offset, probe_states(hf_model, offset)) for offset in offsets]
    candidates = _frequencies(hf_model)
    tolerance = _STATES.get(hf_model.dtype, _STATES_OF_OTHER_DTYPES)
    _refuse_foresight(hf_model, home, tolerance)
    fits, value_error = [], 0.0
    for index, (keys, values) in enumerate(home):
        moved = [relative_error(layers[index][1].float(), values.float()) for _, layers in away]
        value_error = max(value_error, *moved)
        fit = fit_layout(keys, [(o, layers[index][0]) for o, layers in away], candidates)
        if not (fit.error <= tolerance and max(moved) <= tolerance):
            config: Any = hf_model.config.get_text_config(decoder=True)
            if getattr(config, "kv_lora_rank", None):
                raise _refusal(
                    hf_model,
                    "it uses multi-head latent attention (its config has a kv_lora_rank), which "
                    "is not supported yet; use a model with grouped-query attention",
                )
            raise _refusal(
                hf_model,
                f"in layer {index}, keys at another position differ by {fit.error:.2g} from every "
                f"known rotation, and values differ by {max(moved):.2g}; expected at most "
                f"{tolerance:g} from rounding. The position embedding is not plain rotary "
                f"({len(candidates)} frequency tables found)",
            )
        fits.append(fit)
    return home, fits, value_error


def _refuse_foresight(
    hf_model: PreTrainedModel, home: list[tuple[Tensor, Tensor]], tolerance: float
) -> None:
    """Refuse a model without causal attention, because padding would change its blocks."""
    half = _PROBE_TOKENS // 2
    for whole, part in zip(home, probe_states(hf_model, 0, half), strict=True):
        error = max(
            relative_error(a[:, :half].float(), b.float()) for a, b in zip(whole, part, strict=True)
        )
        if not error <= tolerance:
            raise _refusal(
                hf_model,
                f"its attention is not causal: keys or values change by {error:.2g} when text is "
                "appended. Block mode requires causal attention",
            )


def probe_states(
    hf_model: PreTrainedModel, offset: int = 0, tokens: int = _PROBE_TOKENS
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values per layer, ``[heads, tokens, size]``, of fixed probe tokens at ``offset``.

    Raises:
        UnsupportedModelError: the model cannot run the probe.
        ValueError: the model is in training mode, or autocast is on.
    """
    check_ready(hf_model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary_size(hf_model), (1, _PROBE_TOKENS), generator=generator)
    ids = ids[:, :tokens].to(hf_model.device)
    positions = torch.arange(offset, offset + tokens, device=hf_model.device)[None]
    cache = DynamicCache()
    try:
        hf_model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise _refusal(hf_model, f"it fails on {tokens} tokens at {offset}: {error}") from error
    states = layer_states(cache)
    if any(keys is None or values is None for keys, values in states):
        # Only some releases of transformers use a regular cache layer for such states.
        raise _refusal(hf_model, "some layers cache a state other than keys and values")
    return [(keys[0], values[0]) for keys, values in states]


def check_ready(hf_model: PreTrainedModel) -> None:
    """Refuse settings that change keys and values without changing the fingerprint.

    Autocast applies to one thread, but KV is shared with other threads and processes.

    Raises:
        ValueError: the model is in training mode, or autocast is on in this thread for the model's
            device.
    """
    if hf_model.training:
        raise ValueError(
            f"{type(hf_model).__name__} is in training mode, in which keys and values are random "
            "(dropout) or missing (gradient checkpointing). Call its eval() method first"
        )
    kind = hf_model.device.type
    if torch.is_autocast_enabled(kind):
        precision = torch.get_autocast_dtype(kind)
        raise ValueError(
            f"Autocast to {precision} is on, but keys and values must be computed in the model's "
            f"dtype, {hf_model.dtype}. Leave the torch.autocast context, or load the model with "
            f"dtype={precision}"
        )


def layer_states(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values per layer of a transformers cache, ``[batch, heads, tokens, head_dim]``."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def vocabulary_size(hf_model: PreTrainedModel) -> int:
    embeddings: Any = hf_model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def _frequencies(hf_model: PreTrainedModel) -> list[Tensor]:
    """The distinct RoPE frequency tables among the model's buffers."""
    tables: list[Tensor] = []
    for name, buffer in hf_model.named_buffers():
        if name.endswith("inv_freq") and buffer.dim() == 1:
            # Copied, because the model may overwrite its table after blocks have been stored.
            table = buffer.detach().float().cpu().clone()
            if not any(torch.equal(known, table) for known in tables):
                tables.append(table)
    return tables


def _refusal(subject: object, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(subject).__name__} cannot be used with Block-Attention: {reason}."
    )
