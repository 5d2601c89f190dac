"""Transformers caches that begin with stored blocks, which are copied or read in place.

Hooks before and after each forward pass record its ``ContextCache``, if any, so that the attention
function can look it up (``running_cache``). Nested forward passes, such as those of a logits
processor, therefore use their own cache. The record is a context variable, so several engines and
threads may run concurrently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from blockattn_rag.attention.kernels import AttentionInputs
from blockattn_rag.attention.relay import RelayPlan
from blockattn_rag.kv.context import Context, assemble
from blockattn_rag.kv.rope import RotaryLayout
from blockattn_rag.model.kinds import LayerKind, in_order, new_cache, storing


class CacheAttention(Protocol):
    """Computes the attention of a forward pass; see ``RelayPlan.attend``.

    ``takes_mask``: Whether ``attend`` uses a mask. Otherwise, no mask is built.
    """

    @property
    def takes_mask(self) -> bool: ...

    def attend(self, layer: int, inputs: AttentionInputs, /) -> Tensor: ...


States = Sequence[tuple[Tensor, Tensor]]
"""Keys and values ``[1, heads, tokens, size]`` of each layer that stores them."""


class ContextCache(DynamicCache):
    """Cache whose first tokens are the blocks of a context.

    ``attention``: Attention of forward passes over this cache. None: the model's own attention.
    ``takes_one_token``: Whether forward passes are limited to one token; see ``model.states``.
    """

    attention: CacheAttention | None = None
    takes_one_token = False

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row for beam search."""
        layers: Any = self.layers
        for layer in layers:
            if isinstance(layer, LinearAttentionLayer):  # Transformers does not repeat states.
                for states in (layer.conv_states, layer.recurrent_states):
                    for index, state in states.items():
                        if state is not None:
                            states[index] = state.repeat_interleave(repeats, dim=0)
            if hasattr(layer, "batch_repeat_interleave"):
                layer.batch_repeat_interleave(repeats)

    @property
    def _storing(self) -> list[Any]:
        # Compare names, because transformers 5.19 has no class for layers that share keys.
        return [layer for layer in self.layers if type(layer).__name__ != "DummyLayer"]

    def append(self, states: States, tokens: int) -> None:
        """Append the first ``tokens`` tokens of ``states`` to a cache with one row.

        ``states``: The return value of ``tail_states``, or empty.
        """
        with torch.inference_mode():
            for layer, (keys, values) in zip(self._storing, states, strict=False):
                layer.update(keys[:, :, :tokens], values[:, :, :tokens])

    def tail_states(self, tokens: int) -> States | None:
        """Return the keys and values of the last ``tokens`` tokens from the layers that store them.

        None if a layer has a state, is empty, or may have dropped tokens (sliding windows), or if
        the cache has several rows (beams).
        """
        layers = self._storing
        if not all(
            type(one) in (DynamicLayer, _GrowingLayer, _TailLayer)
            and one.is_initialized
            and len(one.keys) == 1
            for one in layers
        ):
            return None
        return [(_last(one.keys, tokens), _last(one.values, tokens)) for one in layers]


ROOM = 512
"""Number of tokens by which the tensors of a copied context grow at a time, so that appending a
token rarely copies the complete context."""


def copied_cache(
    config: Any,
    contexts: Sequence[Context],
    layouts: Sequence[RotaryLayout],
    kinds: Sequence[LayerKind],
    *,
    keeps_all: bool = False,
) -> ContextCache:
    """Create a cache with the contexts' keys and values, rotated and concatenated (copy path).

    Each context is one row, padded with zeros on the left. The states of state layers are not set.
    ``keeps_all``: Whether layers keep tokens beyond their sliding windows.
    """
    cache = ContextCache(config=config)
    if keeps_all:
        cache.layers = new_cache(config).layers
    width = max(context.num_tokens for context in contexts)
    blocks = (block.kv for context in contexts for block in context.blocks)
    is_trained = torch.is_grad_enabled() and any(kv.keys[0].requires_grad for kv in blocks)
    # Use `no_grad`, not inference mode, because later forward passes write to the free space.
    with torch.set_grad_enabled(is_trained):
        room = ROOM if len(contexts) == 1 and not is_trained else 0
        rows = [
            assemble(context, layouts, room) if context.blocks else None for context in contexts
        ]
        for index in storing(kinds):
            states = [next(row) if row else None for row in rows]
            keys, values = in_order(
                kinds[index],
                *(_padded_rows([s and s[part] for s in states], width + room) for part in (0, 1)),
            )
            if type(cache.layers[index]) is DynamicLayer:
                cache.layers[index] = _GrowingLayer(keys, values, width)
            else:  # Layers with sliding windows drop keys and values.
                cache.update(keys[:, :, :width], values[:, :, :width], index)
    return cache


class _GrowingLayer(DynamicLayer):
    """Layer that writes new tokens into free space at the end of its tensors
    ``[rows, heads, tokens + room, size]``."""

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._buffers = keys, values
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        assert self.keys is not None
        assert self.values is not None
        keys, values = self._buffers
        # Selecting rows replaces the tensors, for example in beam search.
        is_own = self.keys.data_ptr() == keys.data_ptr() and len(key_states) == len(keys)
        if torch.is_grad_enabled() or not is_own or key_states.dtype != keys.dtype:
            # Do not overwrite tensors that gradients need, and free buffers that were replaced.
            self._buffers = keys.new_empty(0), values.new_empty(0)
            return super().update(key_states, value_states)
        used = self.get_seq_length()
        keys, values = self._buffers = (
            _appended(keys, used, key_states),
            _appended(values, used, value_states),
        )
        tokens = used + key_states.shape[2]
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]
        return self.keys, self.values


def _appended(buffer: Tensor, used: int, new: Tensor) -> Tensor:
    """Write ``new`` after the ``used`` tokens of a buffer. Returns the buffer or a larger copy."""
    tokens = used + new.shape[2]
    if tokens > buffer.shape[2]:
        states = buffer[:, :, :used]
        with torch.inference_mode(mode=False):
            # Later forward passes outside of inference mode must be able to write to the buffer.
            buffer = torch.empty(
                (*states.shape[:2], tokens + ROOM, states.shape[3]),
                dtype=states.dtype,
                device=states.device,
            )
        buffer[:, :, :used] = states
    buffer[:, :, used:tokens] = new
    return buffer


def _padded_rows(rows: Sequence[Tensor | None], width: int) -> Tensor:
    """Pad ``[heads, tokens, size]`` tensors to ``[rows, heads, width, size]``. None: all zeros."""
    some = next(row for row in rows if row is not None)
    if len(rows) == 1 and some.shape[1] == width:
        return some[None]
    padded = some.new_zeros(len(rows), some.shape[0], width, some.shape[2])
    for target, row in zip(padded, rows, strict=True):
        if row is not None:
            target[:, width - row.shape[1] :] = row
    return padded


class _TailLayer(DynamicLayer):
    """Layer with the final block and the generated tokens. Its length includes the context."""

    def __init__(self, prefix_tokens: int) -> None:
        super().__init__()
        self.prefix_tokens = prefix_tokens

    def get_seq_length(self) -> int:
        return self.prefix_tokens + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Masks cover only the tail, because all of its tokens attend to the complete context.
        return super().get_seq_length() + query_length, self.prefix_tokens

    def batch_repeat_interleave(self, repeats: int) -> None:
        if super().get_seq_length():
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if super().get_seq_length():
            super().batch_select_indices(indices)


def empty_cache(config: Any) -> ContextCache | None:
    """Create a cache for a prompt without context. None if a layer has a window or a state."""
    cache = ContextCache(config=config)
    return cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None


def _last(states: Tensor, tokens: int) -> Tensor:
    """Copy the last tokens of ``[1, heads, n, size]``. Returns ``states`` if it has no others."""
    return states if states.shape[2] == tokens else states[:, :, -tokens:].clone()


class RelayCache(ContextCache):
    """Cache for ``generate`` whose first tokens are the blocks of a plan, read in place.

    ``layers``: Layers of the model's own cache. Layers with keys and values are replaced.
    """

    def __init__(self, plan: RelayPlan, layers: Sequence[Any], kinds: Sequence[LayerKind]) -> None:
        super().__init__()
        self.layers = [
            _TailLayer(plan.num_tokens) if kind.stores else own
            for own, kind in zip(layers, kinds, strict=True)
        ]
        self.attention = plan


# Caches of the nested forward passes in this thread, innermost last. They nest because a model
# calls its decoder with the same cache.
_caches: ContextVar[tuple[ContextCache | None, ...]]
_caches = ContextVar("blockattn_running_caches", default=())


def note_caches(hf_model: PreTrainedModel) -> None:
    """Register the hooks that record the cache of each forward pass."""
    for module in hf_model.modules():
        # Inner models need hooks, too, because `generate` of a PEFT model runs the wrapped model.
        has_hooks = _enter in module._forward_pre_hooks.values()
        if isinstance(module, PreTrainedModel) and not has_hooks:
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)


def _enter(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = (*args, *kwargs.values())
    caches = (value for value in given if isinstance(value, ContextCache))
    _caches.set((*_caches.get(), next(caches, None)))


def _leave(*_: Any) -> None:
    """Remove the record at the end of a forward pass, even if it failed."""
    _caches.set(_caches.get()[:-1])


def running_cache() -> ContextCache | None:
    """Return the ``ContextCache`` of the innermost running forward pass in this thread, if any."""
    caches = _caches.get()
    return caches[-1] if caches else None


@contextmanager
def isolated_caches() -> Iterator[None]:
    """Record caches separately from outer forward passes, and clean up afterwards, because a
    keyboard interrupt skips PyTorch's hooks."""
    token = _caches.set((None,))
    try:
        yield
    finally:
        _caches.reset(token)
