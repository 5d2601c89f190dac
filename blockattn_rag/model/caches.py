"""Transformers caches over placed blocks: their states copied, or left where they lie.

Hooks before and after each forward of a model note the ``ContextCache`` that it was given, if any,
for the attention inside (``running_cache``). So a forward within a forward, such as that of a
logits processor with a cache of its own, computes as ever. What is noted stands in a context
variable, so several engines and threads may run at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from blockattn_rag.attention.block_mass import BlockMass
from blockattn_rag.attention.relay import RelayPlan
from blockattn_rag.kv.context import Context, assemble
from blockattn_rag.kv.rope import RotaryLayout


class Attention(Protocol):
    """What attends in the place of the model's own attention; see ``RelayPlan.attend``."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        mask: Tensor | None,
    ) -> Tensor: ...


class ContextCache(DynamicCache):
    """A cache whose first tokens are the blocks of a context.

    ``attention``: what attends in forwards over this cache; None: the model's own attention.
    """

    attention: Attention | None = None


def copied_cache(
    config: Any,
    contexts: Sequence[Context],
    layouts: Sequence[RotaryLayout],
) -> ContextCache:
    """The contexts' keys and values, re-encoded and joined, in a new cache (the copy path).

    One row a context, padded with zeros on the left.
    """
    cache = ContextCache(config=config)
    width = max(context.num_tokens for context in contexts)
    with torch.inference_mode(not _is_trained(contexts)):
        rows = [assemble(context, layouts) if context.blocks else None for context in contexts]
        for index in range(len(layouts)):
            states = [next(row) if row else None for row in rows]
            keys, values = (_padded_rows([s and s[part] for s in states], width) for part in (0, 1))
            layer = cache.layers[index]
            if type(layer) is DynamicLayer:
                # What `update` does, less a copy of everything.
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
            else:
                cache.update(keys, values, index)  # a sliding window keeps the end of its states
    return cache


def _is_trained(contexts: Sequence[Context]) -> bool:
    """Whether gradients are to reach the blocks' keys and values."""
    blocks = (block.kv for context in contexts for block in context.blocks)
    return torch.is_grad_enabled() and any(kv.keys[0].requires_grad for kv in blocks)


def _padded_rows(rows: Sequence[Tensor | None], width: int) -> Tensor:
    """``[heads, tokens, size]`` tensors as one ``[rows, heads, width, size]``; None: padding."""
    some = next(row for row in rows if row is not None)
    if len(rows) == 1 and some.shape[1] == width:
        return some[None]
    padded = some.new_zeros(len(rows), some.shape[0], width, some.shape[2])
    for target, row in zip(padded, rows, strict=True):
        if row is not None:
            target[:, width - row.shape[1] :] = row
    return padded


class _TailLayer(DynamicLayer):
    """Holds the final block and the generated tokens; counts the context's tokens as present."""

    def __init__(self, prefix_tokens: int) -> None:
        super().__init__()
        self.prefix_tokens = prefix_tokens

    def get_seq_length(self) -> int:
        return self.prefix_tokens + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Masks are made for the tail alone; the context is visible to all of it.
        return super().get_seq_length() + query_length, self.prefix_tokens

    def batch_repeat_interleave(self, repeats: int) -> None:
        if super().get_seq_length():
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if super().get_seq_length():
            super().batch_select_indices(indices)


States = Sequence[tuple[Tensor, Tensor]]
"""Keys and values ``[1, heads, tokens, size]`` of each layer."""


def empty_cache(config: Any) -> ContextCache | None:
    """A cache for a prompt without a context; None for a model with windows, which forget."""
    cache = ContextCache(config=config)
    return cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None


def add_states(cache: DynamicCache, states: States, tokens: int) -> None:
    """Let a cache of one row hold the first ``tokens`` of these states after what it holds."""
    with torch.inference_mode():
        for index, (keys, values) in enumerate(states):
            cache.update(keys[:, :, :tokens], values[:, :, :tokens], index)


def tail_states(cache: DynamicCache, tokens: int) -> States | None:
    """What a cache of one row holds of its last ``tokens``, in memory that holds nothing else.

    None where it may not hold all of it (sliding windows), or has several rows (beams).
    """
    layers: Any = cache.layers
    if any(type(one) not in (DynamicLayer, _TailLayer) for one in layers):
        return None
    states = [(one.keys, one.values) for one in layers if one.is_initialized]
    if len(states) < len(layers) or any(len(keys) != 1 for keys, _ in states):
        return None
    return [(_last(keys, tokens), _last(values, tokens)) for keys, values in states]


def _last(states: Tensor, tokens: int) -> Tensor:
    """The last tokens of ``[1, heads, n, size]``: a copy, unless these are all."""
    return states if states.shape[2] == tokens else states[:, :, -tokens:].clone()


class RelayCache(ContextCache):
    """A cache for ``generate`` whose first tokens are the plan's blocks, left where they lie."""

    attention: RelayPlan | BlockMass

    def __init__(self, plan: RelayPlan | BlockMass) -> None:
        super().__init__()
        self.layers = [_TailLayer(plan.num_tokens) for _ in range(plan.num_layers)]
        self.attention = plan


# The caches of forwards that run inside one another in this thread, the innermost last: a model's
# forward runs its decoder's forward, with the same cache.
_caches: ContextVar[tuple[ContextCache | None, ...]]
_caches = ContextVar("blockattn_running_caches", default=())


def note_caches(hf_model: PreTrainedModel) -> None:
    """Let a model's forwards note their caches; nothing else changes."""
    for module in hf_model.modules():
        # Every model inside: of a model that PEFT wraps, `generate` runs the inner one.
        if isinstance(module, PreTrainedModel):
            if _enter not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_enter, with_kwargs=True)
            if _leave not in module._forward_hooks.values():
                module.register_forward_hook(_leave, always_call=True)


def _enter(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward begins."""
    given = (*args, *kwargs.values())
    caches = (value for value in given if isinstance(value, ContextCache))
    _caches.set((*_caches.get(), next(caches, None)))


def _leave(*_: Any) -> None:
    """A forward ends, be it by an error."""
    _caches.set(_caches.get()[:-1])


def running_cache() -> ContextCache | None:
    """The cache of the innermost forward that runs in this thread."""
    caches = _caches.get()
    return caches[-1] if caches else None


@contextmanager
def running_with(cache: ContextCache | None = None) -> Iterator[None]:
    """Begin with this cache, and leave none behind: a keyboard interrupt skips PyTorch's hooks."""
    token = _caches.set((cache,))
    try:
        yield
    finally:
        _caches.reset(token)
