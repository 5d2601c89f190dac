"""Relay attention inside transformers: an attention function, and a cache without its prefix.

No model code is touched. The attention function is registered by name and set on the model; it does
what the model did before unless the forward that runs was given a ``RelayCache``. Hooks before and
after each forward of the model see to that: whatever else runs the model meanwhile, such as a
logits processor with a cache of its own, attends as ever. The plan of the forward that runs stands
in a context variable, so several engines and threads may run at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blockattn_rag.attention.relay import RelayPlan
from blockattn_rag.attention.tuning import CPU
from blockattn_rag.kv.context import Context, place
from blockattn_rag.kv.rope import RotaryLayout, relative_error
from blockattn_rag.model.probe import vocabulary_size
from blockattn_rag.model.requests import EncodeRequest

if TYPE_CHECKING:
    from torch import Tensor

    from blockattn_rag.model.block_model import BlockModel

_PREFIX = "blockattn_relay_"

# Of the forwards that run inside one another in this thread, the innermost last. A model's forward
# runs that of its decoder inside, with the same cache.
_plans: ContextVar[tuple[RelayPlan | None, ...]] = ContextVar("blockattn_relay_plans", default=())


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


def relay_cache(
    hf_model: PreTrainedModel,
    contexts: Sequence[Context],
    layouts: Sequence[RotaryLayout],
    width: int,
) -> RelayCache:
    """A cache over the contexts where they lie; ``width``: tokens of the longest one."""
    # Again: whoever else holds the model may have set another attention since it was loaded.
    enable_relay(hf_model)
    return RelayCache(len(layouts), width, RelayPlan(contexts, layouts, hf_model.device))


def is_exact(model: BlockModel) -> bool:
    """Make a model ready for relay attention, and see whether it gives the copy path's logits.

    Windows, soft caps and attention sinks are ruled out beforehand: a short probe might not show
    them.
    """
    config = model.hf_model.config.get_text_config(decoder=True)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    sinks = any(name.endswith("sinks") for name, _ in model.hf_model.named_parameters())
    if capped or sinks or any(window is not None for window in model.profile.windows):
        return False
    enable_relay(model.hf_model)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(vocabulary_size(model.hf_model), (3, 7), generator=generator)
    blocks = [kv for batch in model.encode(_requests(rows[:2])) for kv in batch]
    context = place(blocks)
    layouts, device = model.profile.layouts, model.device
    for tokens in (7, 1):  # as in a prompt, and as in an answer
        expected = model.next_logits(rows[2:, :tokens], model.cache_for(context))
        # Small as they are, the blocks must be read one by one here.
        plan = RelayPlan([context], layouts, device, tuning=_ONE_BY_ONE)
        cache = RelayCache(len(layouts), context.num_tokens, plan)
        found = model.next_logits(rows[2:, :tokens], cache)
        if relative_error(found.float(), expected.float()) > _TOLERANCE[model.dtype]:
            return False
    return True


_ONE_BY_ONE = replace(CPU, join_prefill_tokens=0, join_decode_tokens=0)


def _requests(rows: Tensor) -> list[EncodeRequest]:
    return [EncodeRequest(row.tolist(), str(index), "") for index, row in enumerate(rows)]


# Both paths differ by rounding alone; attention that bypasses the plan differs by about 1.
_TOLERANCE = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 3e-2,
    torch.bfloat16: 0.15,
}


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
