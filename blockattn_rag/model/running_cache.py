"""The cache of the forward that runs, for the attention inside it.

Hooks before and after each forward of a model note the ``ContextCache`` that it was given, if any.
So a forward within a forward, such as that of a logits processor with a cache of its own, computes
as ever. What is noted stands in a context variable, so several engines and threads may run at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import PreTrainedModel

from blockattn_rag.model.caches import ContextCache

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
