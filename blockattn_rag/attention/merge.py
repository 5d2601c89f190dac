"""Merges partial attention results by their log-sum-exp.

Attention outputs over disjoint sets of keys, each with its log-sum-exp, can be merged exactly into
attention over all keys (RelayAttention, section 3.3 and appendix A).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_LSE = torch.finfo(torch.float32).min
"""Replacement for a log-sum-exp of -inf in subtractions, because -inf - -inf is NaN."""


class Partial(NamedTuple):
    """Attention over some keys: output ``[..., Q, D]`` and log-sum-exp ``[..., Q]``, float32.

    If all keys are masked for a query, its output is 0 and its log-sum-exp is -inf.
    """

    output: Tensor
    lse: Tensor


def with_sinks(part: Partial, sinks: Tensor | None) -> Tensor:
    """Attention output over all keys, reduced by the weight that goes to attention sinks.

    A sink acts as a key with its own score, broadcastable to ``part.lse``, and a value of 0.
    """
    if sinks is None:
        return part.output
    return part.output * (part.lse - sinks).sigmoid().unsqueeze(-1)


def merge(parts: Sequence[Partial]) -> Partial:
    """Merge attention over disjoint key sets (RelayAttention, equations 4-6), in float32."""
    lses = torch.stack([part.lse for part in parts])
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse.clamp_min(LEAST_LSE)).exp().unsqueeze(-1)
    output = parts[0].output * weights[0]
    # Add one part at a time, because a stack of all outputs may not fit in the CPU cache.
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        output.addcmul_(part.output, weight)
    return Partial(output, lse)
