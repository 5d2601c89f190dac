"""Recomputation: a share of the passages' tokens, chosen by the question, with full attention.

Block mode computes each passage alone. Here, the tokens that the question attends to most in the
last third of the layers are computed again and attend to everything before them; the others keep
their keys and values. This costs two more forward passes: one of the question, for its attention,
and one of the chosen tokens. CacheBlend (arXiv 2405.16444) recomputes tokens; ProphetKV and QCFuse
choose them by the question. ``benchmarks/results/quality`` compares ways to choose.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from blockattn_rag.attention.kernels import (
    attend,
    attend_causal,
    attend_plain,
    fold_heads,
    kernel_for,
)
from blockattn_rag.attention.merge import merge
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, PlacedBlock
from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.caches import ContextCache, copied_cache, running_with
from blockattn_rag.model.encoding import logits_to_keep
from blockattn_rag.model.probe import check_ready
from blockattn_rag.model.relay_attention import enable_relay, last_logits

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
    cache = copied_cache(model.hf_model.config, [context], model.profile.layouts)
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
        cache: A copied cache of the context, which is used up.
    """
    if cache is None:
        cache = copied_cache(model.hf_model.config, [context], model.profile.layouts)
    _compute(model, context, cache, chosen)
    identity = [block.kv.digest for block in context.blocks], [*chosen]
    keys, values = [], []
    layers: Any = cache.layers
    while layers:  # copies, because the cache has room for more tokens; one layer exists twice
        layer = layers.pop(0)
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


def check_can_recompute(model: BlockModel) -> None:
    """Raise UnsupportedModelError if the model's attention is not plain, as relay requires."""
    if not model.supports_relay:
        raise UnsupportedModelError(
            f"{model.name} cannot recompute tokens: it has sliding windows, soft caps, attention "
            "sinks or its own attention interface; use a recipe with recompute=0"
        )


def attention_to_context(
    model: BlockModel,
    context: Context,
    final_ids: Sequence[int],
    cache: ContextCache | None = None,
    first_layer: int | None = None,
) -> Tensor:
    """Attention of the final block to each token of the context, ``[tokens]`` float32, summed over
    layers, and averaged over heads and the final block's tokens.

    Args:
        cache: A copied cache of the context, which is left as it was.
        first_layer: Index of the first layer to measure. Default: that of the last third.
    """
    if cache is None:
        cache = copied_cache(model.hf_model.config, [context], model.profile.layouts)
    enable_relay(model.hf_model)
    if first_layer is None:
        first_layer = 2 * len(model.profile.layouts) // 3
    scores = _MeasuredAttention(context.num_tokens, len(final_ids), first_layer, model.device)
    cache.attention = scores
    last_logits(model.hf_model, torch.tensor([[*final_ids]]), cache, 1)
    cache.attention = None
    cache.crop(-len(final_ids))
    return scores.total


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
        has_causal_kernel: Whether ``attend_causal`` may be used.
    """

    takes_mask = False

    def __init__(self, chosen: Sequence[int], places: Tensor, *, has_causal_kernel: bool) -> None:
        self._chosen, self._places = chosen, places
        self._keys = torch.arange(chosen[-1] + 1, device=places.device)
        self._has_causal_kernel = has_causal_kernel

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, _: Tensor | None
    ) -> Tensor:
        """See ``RelayPlan.attend``. Keys and values are those of the context."""
        start, outputs = 0, []
        while start < len(self._chosen):
            run = self._run(start)
            is_causal = self._has_causal_kernel and run >= _MOST_ROWS
            rows = run if is_causal else self._rows(start, query, key, value)
            end = start + rows
            seen = slice(self._chosen[end - 1] + 1)
            states = query[:, :, start:end], key[:, :, seen], value[:, :, seen]
            output = (
                attend_causal(*states, scale) if is_causal else self._masked(start, *states, scale)
            )
            outputs.append(output.to(query.dtype))
            start = end
        return torch.cat(outputs, dim=2)

    def _run(self, start: int) -> int:
        """Number of chosen tokens from ``start`` that follow each other without a gap."""
        places = self._chosen
        sizes = range(1, len(places) - start)
        return 1 + bisect_right(sizes, 0, key=lambda n: places[start + n] - places[start] - n)

    def _rows(self, start: int, query: Tensor, key: Tensor, value: Tensor) -> int:
        """Number of tokens in the chunk from ``start``."""
        first = self._chosen[start]
        heads, groups = query.shape[1], query.shape[1] // key.shape[1]
        keeps_scores = kernel_for(query, key, value) is attend_plain

        def elements(rows: int) -> int:
            """Elements of the chunk's mask, or of its scores if the kernel keeps them."""
            end = self._chosen[start + rows - 1] + 1
            return rows * (heads * end if keeps_scores else groups * (end - first))

        sizes = range(1, min(_MOST_ROWS, len(self._chosen) - start) + 1)
        return max(1, bisect_right(sizes, _MOST_SCORES, key=elements))

    def _masked(
        self, start: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Attention of the chunk from ``start``. The last key is that of the last query."""
        first, rows = self._chosen[start], slice(start, start + query.shape[2])
        visible = self._places[rows, None] >= self._keys[first : key.shape[2]]
        folded, mask = fold_heads(query, visible[None, None], key.shape[1])
        result = attend(folded, key[:, :, first:], value[:, :, first:], scale, mask)
        if first:
            before = attend(folded, key[:, :, :first], value[:, :, :first], scale)
            result = merge([before, result])
        return result.output.reshape(*query.shape[:3], -1)


class _MeasuredAttention(_ChosenAttention):
    """Attention of the tokens after a context, which adds up what the context's tokens receive.

    Measured in float32, because the scores decide which tokens are chosen.

    Args:
        before: Number of tokens in the context.
        after: Number of tokens after it.
        first_layer: Index of the first layer to measure.
    """

    def __init__(self, before: int, after: int, first_layer: int, device: torch.device) -> None:
        places = torch.arange(before, before + after, device=device)
        super().__init__(range(before, before + after), places, has_causal_kernel=False)
        self.total = torch.zeros(before, dtype=torch.float32, device=device)
        self._first_layer = first_layer

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, _: Tensor | None
    ) -> Tensor:
        """See ``RelayPlan.attend``. Keys and values are those of context and tail."""
        if layer < self._first_layer:
            return super().attend(layer, query, key, value, scale, _)
        keys, before, outputs = key.float().mT, len(self.total), []
        heads, tokens = query.shape[1:3]
        places = torch.arange(tokens, device=query.device)
        step = max(1, _MOST_SCORES // (heads * keys.shape[-1]))
        for start in range(0, tokens, step):
            end = min(start + step, tokens)
            folded = fold_heads(query[:, :, start:end].float(), None, key.shape[1])[0]
            scores = (folded @ keys[..., : before + end] * scale).unflatten(2, (-1, end - start))
            scores[..., before:].masked_fill_(places[start:end, None] < places[:end], -math.inf)
            weights = scores.softmax(-1).flatten(2, 3)
            self.total += weights[..., :before].sum(dim=(0, 1, 2)) / (heads * tokens)
            output = weights.to(value.dtype) @ value[:, :, : before + end]
            outputs.append(output.reshape(*query.shape[:2], end - start, -1))
        return torch.cat(outputs, dim=2)


def _compute(
    model: BlockModel, context: Context, cache: ContextCache, chosen: Sequence[int]
) -> None:
    """Compute the chosen tokens with full attention, and replace their keys and values."""
    ids = context.token_ids
    places = torch.tensor(chosen, device=model.device)
    layers: Any = cache.layers
    cache.layers = [_ReplacingLayer(layer, places) for layer in layers]
    cache.attention = _ChosenAttention(chosen, places, has_causal_kernel=model.has_causal_kernel)
    with torch.inference_mode(), running_with():
        model.hf_model(
            input_ids=torch.tensor([[ids[place] for place in chosen]], device=model.device),
            position_ids=places[None],
            past_key_values=cache,
            use_cache=True,
            **logits_to_keep(model.hf_model),
        )
