"""Relay attention inside transformers: an attention function that models call by name.

No model code is touched. The attention function is registered by name and set on the model; it does
what the model did before unless the running forward was given a ``RelayCache``. Hooks before and
after each forward of the model note its cache: a forward within a forward, such as that of a logits
processor with a cache of its own, attends as ever. The plan of the forward that runs stands
in a context variable, so several engines and threads may run at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blockattn_rag.attention.relay import RelayPlan
from blockattn_rag.model.caches import RelayCache

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "blockattn_relay_"

# Of the forwards that run inside one another in this thread, the innermost last. A model's forward
# runs that of its decoder inside, with the same cache.
_plans: ContextVar[tuple[RelayPlan | None, ...]] = ContextVar("blockattn_relay_plans", default=())


def enable_relay(hf_model: PreTrainedModel) -> None:
    """Let a model take relay attention in forwards over a ``RelayCache``; else nothing changes."""
    for module in hf_model.modules():
        # All of them: of a model that PEFT wraps, `generate` runs the one inside.
        if isinstance(module, PreTrainedModel):
            _watch(module)
    original = hf_model.config._attn_implementation
    if original.startswith(_PREFIX):
        return
    name = _PREFIX + original
    AttentionInterface.register(name, _attention_function(original))
    AttentionMaskInterface.register(name, _mask_function(original))
    hf_model.set_attn_implementation(name)


def _watch(module: torch.nn.Module) -> None:
    if _enter not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter, with_kwargs=True)
    if _leave not in module._forward_hooks.values():
        module.register_forward_hook(_leave, always_call=True)


def _enter(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward begins: its plan is that of the cache that it was given, if any."""
    caches = (value for value in (*args, *kwargs.values()) if isinstance(value, RelayCache))
    cache = next(caches, None)
    _plans.set((*_plans.get(), cache.plan if cache is not None else None))


def _leave(*_: Any) -> None:
    """A forward ends, be it by an error."""
    _plans.set(_plans.get()[:-1])


def _current_plan() -> RelayPlan | None:
    plans = _plans.get()
    return plans[-1] if plans else None


@contextmanager
def plan_scope(plan: RelayPlan | None = None) -> Iterator[None]:
    """Begin with this plan, and leave none behind: a keyboard interrupt skips PyTorch's hooks."""
    token = _plans.set((plan,))
    try:
        yield
    finally:
        _plans.reset(token)


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
        plan = _current_plan()
        if plan is None:
            forward = ALL_ATTENTION_FUNCTIONS.get_interface(original, _eager_of(module))
            return forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
        index: Any = module.layer_idx
        mask = tail_mask(attention_mask, query, key)
        output = plan.attend(index, query, key, value, scale, mask)
        return output.transpose(1, 2).contiguous(), None

    return relay_attention


def _eager_of(module: torch.nn.Module) -> Any:
    """The plain attention of a model's own source file: what ``eager`` means to it."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _mask_function(original: str) -> Any:
    def relay_mask(*args: Any, **kwargs: Any) -> Any:
        if _current_plan() is None:
            return ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)
        return sdpa_mask(*args, **kwargs)

    return relay_mask


def tail_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask over the tail, True where seen. None means causal to transformers."""
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask >= 0
    rows, columns = query.shape[2], key.shape[2]
    if rows == 1:
        return None
    seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    return seen.tril(columns - rows)[None, None].expand(query.shape[0], 1, rows, columns)
