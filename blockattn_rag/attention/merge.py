"""Merge of partial attention results by their log-sum-exp.

Attention outputs over disjoint sets of keys merge exactly into attention over all keys, given the
log-sum-exp of each set (RelayAttention, section 3.3 and appendix A).

Shapes: ``Q`` query rows, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_LSE = torch.finfo(torch.float32).min
"""Replaces a log-sum-exp of -inf in subtractions, because -inf - -inf is NaN."""


class Partial(NamedTuple):
    """Attention over some keys: output ``[..., Q, D]`` and log-sum-exp ``[..., Q]``, float32.

    The output is 0 and the log-sum-exp is -inf for a query to which all keys are masked.
    """

    output: Tensor
    lse: Tensor


def with_sinks(part: Partial, sinks: Tensor | None) -> Tensor:
    """Output of attention to all keys, after attention sinks take their share of the weight.

    A sink is a key with its own score and a value of 0.

    Args:
        part: Attention to all keys.
        sinks: Score of the sink of each query row, broadcastable to ``part.lse``. None: no sinks.
    """
    if sinks is None:
        return part.output
    return part.output * (part.lse - sinks).sigmoid().unsqueeze(-1)


def merge(parts: Sequence[Partial]) -> Partial:
    """Merge attention over disjoint key sets (RelayAttention, equations 4-6), in float32.

    Args:
        parts: One partial result per key set, all of one shape.
    """
    lses = torch.stack([part.lse for part in parts])
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse.clamp_min(LEAST_LSE)).exp().unsqueeze(-1)
    output = parts[0].output * weights[0]
    # One part at a time, because a stack of all outputs would not fit in the CPU cache.
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        output.addcmul_(part.output, weight)
    return Partial(output, lse)
