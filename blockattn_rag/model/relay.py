"""Relay attention inside transformers: an attention function, and a cache whose prefix is elsewhere.

No model code is touched. The attention function is registered by name and set on the model; it does
what the model did before unless the current context holds a ``RelayPlan``. The plan travels with
the call in a context variable, so several engines and threads may run at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blockattn_rag.attention import RelayPlan

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "blockattn_relay_"
_active_plan: ContextVar[RelayPlan | None] = ContextVar("blockattn_relay_plan", default=None)


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


class RelayCache(DynamicCache):
    """A cache for ``generate`` whose first ``prefix_tokens`` tokens are the plan's blocks."""

    def __init__(self, num_layers: int, prefix_tokens: int, plan: RelayPlan) -> None:
        super().__init__()
        self.layers = [_TailLayer(prefix_tokens) for _ in range(num_layers)]
        self.plan = plan


def enable_relay(hf_model: PreTrainedModel) -> None:
    """Let a model take relay attention when a plan is active; otherwise nothing changes."""
    original = hf_model.config._attn_implementation
    if original.startswith(_PREFIX):
        return
    name = _PREFIX + original
    AttentionInterface.register(name, _attention_function(original))
    AttentionMaskInterface.register(name, _mask_function(original))
    hf_model.set_attn_implementation(name)


@contextmanager
def active(cache: Any) -> Iterator[None]:
    """Within this, the model attends through the cache's plan, if it has one."""
    token = _active_plan.set(cache.plan if isinstance(cache, RelayCache) else None)
    try:
        yield
    finally:
        _active_plan.reset(token)


def _attention_function(original: str) -> Any:
    def relay_attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        plan = _active_plan.get()
        if plan is None:
            forward = ALL_ATTENTION_FUNCTIONS.get_interface(original, _eager_of(module))
            return forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
        index: Any = module.layer_idx
        mask = _tail_mask(attention_mask, query, key)
        output = plan.attend(index, query, key, value, scale, mask)
        return output.transpose(1, 2).contiguous(), None

    return relay_attention


def _eager_of(module: torch.nn.Module) -> Any:
    """The plain attention of a model's own source file: what ``eager`` means to it."""
    import sys

    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _mask_function(original: str) -> Any:
    def relay_mask(*args: Any, **kwargs: Any) -> Any:
        if _active_plan.get() is None:
            return ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)
        return sdpa_mask(*args, **kwargs)

    return relay_mask


def _tail_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask over the tail, True where seen. None means causal to transformers."""
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask >= 0
    rows, columns = query.shape[2], key.shape[2]
    if rows == 1:
        return None
    seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    return seen.tril(columns - rows)[None, None].expand(query.shape[0], 1, rows, columns)
