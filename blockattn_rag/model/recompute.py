"""Recomputation: a share of the passages' tokens, chosen by the question, with full attention.

Block mode computes each passage alone. Here, the tokens that the question attends to most in the
last third of the layers (``measured_layers``) are computed again and attend to everything before
them; the others keep their keys and values. This costs two more forward passes: one of the
question, for its attention, and one of the chosen tokens. CacheBlend (arXiv 2405.16444) recomputes
tokens; ProphetKV and QCFuse choose them by the question. ``benchmarks/results/quality`` compares
ways to choose.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from blockattn_rag.attention.kernels import (
    attend,
    attend_causal,
    attend_plain,
    fold_heads,
    fold_sinks,
    kernel_for,
)
from blockattn_rag.attention.merge import Partial, merge, with_sinks
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, PlacedBlock
from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.caches import ContextCache, copied_cache, running_with
from blockattn_rag.model.encoding import logits_to_keep
from blockattn_rag.model.probe import check_ready
from blockattn_rag.model.relay_attention import (
    OTHER_ATTENTION,
    enable_relay,
    last_logits,
    layer_windows,
)

_MOST_SCORES = 1 << 24
"""Attention scores, or elements of a mask, that are in memory at once."""

_MOST_ROWS = 512
"""Recomputed tokens whose attention is computed at once. More need fewer kernels, but compute more
scores that the mask hides."""


def tokens_to_recompute(context: Context, may_change: Sequence[bool], share: float) -> int:
    """Number of tokens that ``recompute`` recomputes for any question."""
    blocks = zip(context.blocks, may_change, strict=True)
    return round(share * sum(block.kv.num_tokens for block, changes in blocks if changes))


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
        model: The model; see ``check_can_recompute``. The caller must hold its lock.
        context: The context, with reordered positions.
        may_change: Whether the tokens of each block may be chosen: those of passages. It makes no
            sense for the prompt's first block, which already attends to everything before it.
        final_ids: Token ids of the final block.
        share: Share of the tokens that may be chosen.

    Returns:
        The context as one block of its own, and the recomputed tokens' indices in it, in order. The
        given context and no tokens if the share is less than half a token.

    Raises:
        ValueError: the model is in training mode, or autocast is on.
    """
    check_ready(model.hf_model)
    count = tokens_to_recompute(context, may_change, share)
    if not count:
        return context, []
    cache = _copied(model, context)
    received = attention_to_context(model, context, final_ids, cache)
    chosen = choose_tokens(received, context, may_change, count)
    return with_recomputed(model, context, chosen, cache), chosen


@torch.no_grad()
def with_recomputed(
    model: BlockModel, context: Context, chosen: Sequence[int], cache: ContextCache | None = None
) -> Context:
    """The context as one block of its own, with the chosen tokens recomputed.

    Args:
        chosen: Indices of at least one token, in order.
        cache: A copied cache of the context, which keeps all tokens, and is used up.
    """
    cache = cache or _copied(model, context)
    _compute(model, context, cache, chosen)
    identity = [block.kv.digest for block in context.blocks], [*chosen]
    keys, values = [], []
    layers: Any = cache.layers
    kinds = [*model.profile.kinds]
    while layers:  # copies, because the cache has room for more tokens; one layer exists twice
        layer = layers.pop(0)
        if kinds.pop(0).stores:
            keys.append(layer.keys[0].clone())
            values.append(layer.values[0].clone())
    kv = BlockKV(
        keys=tuple(keys),
        values=tuple(values),
        token_ids=torch.tensor(context.token_ids),
        fingerprint=context.blocks[0].kv.fingerprint,
        digest=hashlib.sha256(repr(identity).encode()).hexdigest(),
        handle="",
    )
    return Context((PlacedBlock(kv, 0, 0),))


def _copied(model: BlockModel, context: Context) -> ContextCache:
    """A copied cache of a context, with all of its tokens in every layer."""
    config, profile = model.hf_model.config, model.profile
    return copied_cache(config, [context], profile.layouts, profile.kinds, keeps_all=True)


def choose_tokens(
    received: Tensor, context: Context, may_change: Sequence[bool], count: int
) -> list[int]:
    """Indices of the tokens to recompute, in order: those that receive the most attention.

    Args:
        received: Attention that each token of the context receives, ``[tokens]`` float32.
        may_change: Whether the tokens of each block may be chosen.
        count: Number of tokens to choose.
    """
    lengths = torch.tensor([block.kv.num_tokens for block in context.blocks], dtype=torch.int64)
    allowed = torch.tensor(may_change).repeat_interleave(lengths).to(received.device)
    # Not `topk`, whose choice among equal scores differs between devices.
    ranked = received.masked_fill(~allowed, -1.0).sort(descending=True, stable=True).indices
    return sorted(ranked[:count].tolist())


def can_recompute(model: BlockModel) -> bool:
    """Whether all layers have attention that relay computes, and none has a state."""
    return model.supports_relay and not model.profile.has_states


def check_can_recompute(model: BlockModel) -> None:
    """Raise UnsupportedModelError if a model cannot recompute tokens."""
    if model.profile.has_states:
        raise UnsupportedModelError(
            f"{model.name} cannot recompute tokens: it is a hybrid model, whose state layers "
            "compute tokens one after the other; use a recipe with recompute=0, such as promote=1"
        )
    if not can_recompute(model):
        raise UnsupportedModelError(
            f"{model.name} cannot recompute tokens: it has {OTHER_ATTENTION}; use a recipe with "
            "recompute=0"
        )


def attention_to_context(
    model: BlockModel,
    context: Context,
    final_ids: Sequence[int],
    cache: ContextCache | None = None,
    layers: Collection[int] | None = None,
) -> Tensor:
    """Attention of the final block to each token of the context, ``[tokens]`` float32, summed over
    layers, and averaged over heads and the final block's tokens.

    Args:
        cache: A copied cache of the context, which keeps all tokens, and is left as it was.
        layers: Indices of the layers to measure. Default: ``measured_layers``.
    """
    cache = cache or _copied(model, context)
    enable_relay(model.hf_model)
    windows = layer_windows(model.profile.kinds)
    layers = measured_layers(model) if layers is None else layers
    before, after = context.num_tokens, len(final_ids)
    scores = _MeasuredAttention(before, after, windows, layers, model.device)
    cache.attention = scores
    ids = torch.tensor([[*final_ids]])
    last_logits(model.hf_model, ids, cache, 1, computes_all=True)
    cache.attention = None
    cache.crop(-len(final_ids))
    return scores.total


def measured_layers(model: BlockModel) -> list[int]:
    """The last third of the layers without sliding windows, which hide most passages. If all layers
    have windows: the last third of all layers."""
    windows = layer_windows(model.profile.kinds)
    layers = [layer for layer, window in windows.items() if window is None] or [*windows]
    return layers[2 * len(layers) // 3 :]


class _ReplacingLayer(DynamicLayer):
    """Layer that replaces the keys and values of some tokens by those of the forward pass.

    Args:
        layer: Layer whose tensors are changed.
        places: Indices of the tokens.
    """

    def __init__(self, layer: DynamicLayer, places: Tensor) -> None:
        assert layer.keys is not None
        assert layer.values is not None
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = layer.keys, layer.values
        self._places = places

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self._places, key_states)
        self.values.index_copy_(2, self._places, value_states)
        return self.keys, self.values


class _ChosenAttention:
    """Attention of some tokens of a context to all earlier tokens and themselves.

    Computed in chunks, so that memory is bounded whatever the number of tokens. All tokens of a
    chunk see the keys before its first token, so only the keys after that need a mask.

    Args:
        chosen: Indices of the tokens, in order.
        places: The same on the device.
        windows: Sliding window of each layer.
        has_causal_kernel: Whether ``attend_causal`` may be used.
    """

    takes_mask = False

    def __init__(
        self,
        chosen: Sequence[int],
        places: Tensor,
        windows: Mapping[int, int | None],
        *,
        has_causal_kernel: bool,
    ) -> None:
        self._chosen, self._places, self._windows = chosen, places, windows
        self._keys = torch.arange(chosen[-1] + 1, device=places.device)
        self._has_causal_kernel = has_causal_kernel

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        mask: Tensor | None,
        *,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``RelayPlan.attend``. Keys and values are those of the context."""
        window, outputs = self._windows[layer], []
        # Some models compute only the last tokens in layers that store nothing.
        start = skipped = len(self._chosen) - query.shape[2]
        while start < len(self._chosen):
            run = self._run(start)
            is_causal = self._has_causal_kernel and run >= _MOST_ROWS
            rows = run if is_causal else self._rows(start, query, key, value, window, cap)
            end = start + rows
            first = 0 if window is None else max(0, self._chosen[start] + 1 - window)
            seen = slice(first, self._chosen[end - 1] + 1)
            rows_of = slice(start - skipped, end - skipped)
            states = query[:, :, rows_of], key[:, :, seen], value[:, :, seen]
            if is_causal:
                output = attend_causal(*states, scale)
            else:
                part = self._masked(start, first, *states, scale, window, cap)
                own = None if sinks is None else fold_sinks(sinks, rows, key.shape[1])
                output = with_sinks(part, own).reshape(*states[0].shape[:3], -1)
            outputs.append(output.to(query.dtype))
            start = end
        return torch.cat(outputs, dim=2)

    def _run(self, start: int) -> int:
        """Number of chosen tokens from ``start`` that follow each other without a gap."""
        places = self._chosen
        sizes = range(1, len(places) - start)
        return 1 + bisect_right(sizes, 0, key=lambda n: places[start + n] - places[start] - n)

    def _rows(
        self,
        start: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        cap: float | None,
    ) -> int:
        """Number of tokens in the chunk from ``start``."""
        first, most = self._chosen[start], min(_MOST_ROWS, len(self._chosen) - start)
        heads, groups = query.shape[1], query.shape[1] // key.shape[1]
        keeps_scores = cap is not None or kernel_for(query, key, value) is attend_plain
        if window is not None:  # else, most scores would be hidden
            most = min(most, bisect_left(self._chosen, first + window, lo=start) - start)

        def elements(rows: int) -> int:
            """Elements of the chunk's mask, or of its scores if the kernel keeps them."""
            end = self._chosen[start + rows - 1] + 1
            return rows * (heads * end if keeps_scores else groups * (end - first))

        return max(1, bisect_right(range(1, most + 1), _MOST_SCORES, key=elements))

    def _masked(
        self,
        start: int,
        first: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
    ) -> Partial:
        """Attention of the chunk from ``start``. The keys begin with ``first``, and end with that
        of the last query."""
        places = self._places[start : start + query.shape[2], None]
        # Keys that all queries see need no mask.
        seen = self._chosen[start] - first if window is None else 0
        keys = self._keys[first + seen : first + key.shape[2]]
        visible = places >= keys
        if window is not None:
            visible &= places - keys < window
        folded, mask = fold_heads(query, visible[None, None], key.shape[1])
        result = attend(folded, key[:, :, seen:], value[:, :, seen:], scale, mask, cap)
        if seen:
            before = attend(folded, key[:, :, :seen], value[:, :, :seen], scale, None, cap)
            result = merge([before, result])
        return result


class _MeasuredAttention(_ChosenAttention):
    """Attention of the tokens after a context, which adds up what the context's tokens receive.

    Measured in float32, because the scores decide which tokens are chosen.

    Args:
        before: Number of tokens in the context.
        after: Number of tokens after it.
        windows: Sliding window of each layer.
        layers: Indices of the layers to measure.
    """

    def __init__(
        self,
        before: int,
        after: int,
        windows: Mapping[int, int | None],
        layers: Collection[int],
        device: torch.device,
    ) -> None:
        places = torch.arange(before, before + after, device=device)
        super().__init__(range(before, before + after), places, windows, has_causal_kernel=False)
        self.total = torch.zeros(before, dtype=torch.float32, device=device)
        self._layers = layers

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        mask: Tensor | None,
        *,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``RelayPlan.attend``. Keys and values are those of context and tail."""
        if layer not in self._layers:
            return super().attend(layer, query, key, value, scale, mask, cap=cap, sinks=sinks)
        keys, before, outputs = key.float().mT, len(self.total), []
        heads, tokens = query.shape[1:3]
        step = max(1, _MOST_SCORES // (heads * keys.shape[-1]))
        for start in range(0, tokens, step):
            end = min(start + step, tokens)
            folded = fold_heads(query[:, :, start:end].float(), None, key.shape[1])[0]
            scores = folded @ keys[..., : before + end] * scale
            if cap is not None:
                scores = cap * (scores / cap).tanh()
            scores = scores.unflatten(2, (-1, end - start))
            hidden = self._hidden(start, end, self._windows[layer])
            weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
            if sinks is not None:
                own = sinks.float().view(key.shape[1], -1, 1)
                weights *= (scores.logsumexp(-1) - own).sigmoid().unsqueeze(-1)
            weights = weights.flatten(2, 3)
            self.total += weights[..., :before].sum(dim=(0, 1, 2)) / (heads * tokens)
            output = weights.to(value.dtype) @ value[:, :, : before + end]
            outputs.append(output.reshape(*query.shape[:2], end - start, -1))
        return torch.cat(outputs, dim=2)

    def _hidden(self, start: int, end: int, window: int | None) -> Tensor:
        """Keys that the tokens from ``start`` to ``end`` after the context do not see."""
        places = self._places[start:end, None]
        keys = self._keys[: len(self.total) + end]
        hidden = places < keys
        return hidden if window is None else hidden | (places - keys >= window)


def _compute(
    model: BlockModel, context: Context, cache: ContextCache, chosen: Sequence[int]
) -> None:
    """Compute the chosen tokens with full attention, and replace their keys and values."""
    ids = context.token_ids
    places = torch.tensor(chosen, device=model.device)
    layers: Any = cache.layers
    kinds = model.profile.kinds
    cache.layers = [
        _ReplacingLayer(layer, places) if kind.stores else layer
        for layer, kind in zip(layers, kinds, strict=True)
    ]
    windows, has_kernel = layer_windows(kinds), model.has_causal_kernel
    cache.attention = _ChosenAttention(chosen, places, windows, has_causal_kernel=has_kernel)
    with torch.inference_mode(), running_with():
        model.hf_model(
            input_ids=torch.tensor([[ids[place] for place in chosen]], device=model.device),
            position_ids=places[None],
            past_key_values=cache,
            use_cache=True,
            **logits_to_keep(model.hf_model),
        )
