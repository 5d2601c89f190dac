"""Reference for state layers: runs each segment of a prompt through them separately.

A segment is a block with its sink, or the prompt's first block with the final block. No state is
stored or set: the modules that compute states process one segment's tokens at a time, without a
cache. This module shares no code with ``model.states``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

Rows = tuple[Tensor, Tensor]
"""Indices of a segment's tokens, and whether each token's output is kept (bool)."""


def segments(block: Tensor) -> list[Rows]:
    """Split a prompt into segments. ``block`` ``[n]``: Block index of each token."""
    final = int(block[-1])
    found = []
    for number in range(final + 1):
        rows = block == number
        if number == final:
            rows = rows | (block == 0)
        at = rows.nonzero()[:, 0]
        found.append((at, block[at] == number))
    return found


@contextmanager
def segmented(hf_model: PreTrainedModel, block: Tensor) -> Iterator[None]:
    """Run the state layers segment by segment. ``block`` ``[n]``: Block index of each token."""
    parts = [(at.to(hf_model.device), keeps) for at, keeps in segments(block)]
    with ExitStack() as undo:
        for mixer in state_mixers(hf_model):
            original = mixer.forward
            mixer.forward = _segmented_forward(original, parts)
            undo.callback(mixer.__dict__.pop, "forward")
        yield


def _segmented_forward(forward: Callable[..., Any], parts: list[Rows]) -> Callable[..., Any]:
    tokens = sum(int(keeps.sum()) for _, keeps in parts)

    def cut(value: Any, at: Tensor) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(cut(part, at) for part in value)
        has_tokens = isinstance(value, Tensor) and value.dim() > 1
        return value[:, at] if has_tokens and value.shape[1] == tokens else value

    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = []
        for at, _ in parts:
            own = {n: None if "mask" in n else cut(value, at) for n, value in kwargs.items()}
            outputs.append(forward(*(cut(value, at) for value in args), **own))
        if isinstance(outputs[0], Tensor):
            return _joined(outputs, parts, tokens)
        columns = zip(*outputs, strict=True)
        return tuple(
            _joined(column, parts, tokens) if isinstance(column[0], Tensor) else column[0]
            for column in columns
        )

    return run


def _joined(outputs: Sequence[Tensor], parts: list[Rows], tokens: int) -> Tensor:
    """Join the outputs of segments into one tensor for all tokens."""
    lengths = [len(at) for at, _ in parts]
    first = outputs[0]
    dims = range(1, first.dim())
    dim = next(d for d in dims if [output.shape[d] for output in outputs] == lengths)
    joined = first.new_zeros(*first.shape[:dim], tokens, *first.shape[dim + 1 :])
    for output, (at, keeps) in zip(outputs, parts, strict=True):
        joined.index_copy_(dim, at[keeps], output.index_select(dim, keeps.nonzero()[:, 0]))
    return joined


def state_mixers(hf_model: PreTrainedModel) -> list[nn.Module]:
    """Find the outermost modules that update a state in the cache."""
    running: list[nn.Module] = []
    found: list[nn.Module] = []
    layers = DynamicCache(config=hf_model.config).layers
    if not any(hasattr(layer, "conv_states") for layer in layers):
        return found

    class Watch(DynamicCache):
        def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
            found.append(running[-1])
            return super().update_conv_state(*args, **kwargs)

        def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
            found.append(running[-1])
            return super().update_recurrent_state(*args, **kwargs)

    with ExitStack() as undo, torch.no_grad():
        for module in hf_model.modules():
            before = module.register_forward_pre_hook(lambda own, _: running.append(own))
            after = module.register_forward_hook(lambda *_: running.pop() and None)
            undo.callback(before.remove)
            undo.callback(after.remove)
        ids = torch.tensor([[1, 2, 3, 4]], device=hf_model.device)
        hf_model(input_ids=ids, past_key_values=Watch(config=hf_model.config), use_cache=True)
    inside = {id(part) for one in found for part in one.modules() if part is not one}
    return list({id(one): one for one in found if id(one) not in inside}.values())
