"""The oracle's weighted context: each formula of ``attention.context_merge``, in plain weights.

With a score s of each key, A the sum of exp(s) over the rest and C the sum of exp(s / T) over the
context, plain attention gives a key of the rest the weight exp(s). A key of the context gets the
share exp(s / T) / C of a whole M, which is::

    scale   A (C^T / A)^S         bias, learned   C^T e^B         ape   C^(T S)

All weights are divided by A + M. The sums are formed in float64, as they stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from blockattn_rag.attention.context_merge import ContextMerge, LearnedMerge
from blockattn_rag.check.layout import Layout

_NAME = "blockattn_oracle"


@contextmanager
def weighing(
    hf_model: PreTrainedModel, merge: ContextMerge | None, layout: Layout
) -> Iterator[None]:
    """Let the rows of the final block weigh the context; None changes nothing."""
    final = int(layout.block[-1])
    is_context = (layout.block > 0) & (layout.block < final)
    if merge is None or not is_context.any():
        yield
        return
    before = hf_model.config._attn_implementation

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1).double() for states in (key, value))
        scale = kwargs.get("scaling") or 1 / math.sqrt(query.shape[-1])
        scores = query.double() @ key.mT * scale + mask
        outputs = scores.softmax(-1) @ value
        rows = layout.block == final
        outputs[:, :, rows] = _weighted(scores[:, :, rows], value, is_context, merge, module)
        return outputs.to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, attention)
    hf_model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        hf_model.set_attn_implementation(before)


def _weighted(
    scores: Tensor, value: Tensor, is_context: Tensor, merge: ContextMerge, module: Any
) -> Tensor:
    """The output ``[1, H, Q, D]`` of rows with these scores ``[1, H, Q, N]``."""
    if isinstance(merge, LearnedMerge):
        layer = module.layer_idx
        heat = merge.log_temperature[layer].double().exp()[:, None, None]
        bias = merge.bias[layer].double()[:, None, None]
        shift = merge.shift[layer].double()
        moved = value[:, :, is_context] + shift.repeat_interleave(
            value.shape[1] // len(shift), dim=0
        ).unsqueeze(1)
    else:
        heat, bias = torch.tensor(merge.temperature), torch.tensor(merge.value)
        moved = value[:, :, is_context]
    rest = scores[..., ~is_context].exp()
    context = (scores[..., is_context] / heat).exp()
    a, c = rest.sum(-1, keepdim=True), context.sum(-1, keepdim=True)
    if isinstance(merge, LearnedMerge) or merge.form == "bias":
        whole = c**heat * bias.exp()
    elif merge.form == "scale":
        whole = a * (c**heat / a) ** merge.value
    else:
        whole = c ** (heat * merge.value)
    return (rest @ value[:, :, ~is_context] + context / c * whole @ moved) / (a + whole)
