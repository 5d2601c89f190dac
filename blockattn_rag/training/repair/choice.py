"""Choosing a recipe: the simplest within one standard error of the best free one.

The one-standard-error rule (Breiman et al. 1984) takes the simplest setting that the data cannot
distinguish from the best one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.evaluation.fidelity import FidelityRecord

Losses = Mapping[str, NDArray[np.float64]]
"""Losses of recipes on the same questions, ``[questions]``, by name; the simplest recipe first."""


def loss_of(record: FidelityRecord) -> float:
    """The mean divergence, with the first token counted twice, as in the fit."""
    return (record.kl * record.tokens + record.first_kl) / (record.tokens + 1)


_CONFIDENCE = 1.96
"""Standard errors by which a recipe that computes tokens in every answer has to be better."""


def simplest(losses: Losses, costly: Collection[str] = ()) -> str:
    """The first free recipe whose loss is at most one standard error above the lowest one of these.

    A costly recipe is chosen if its loss is lower than that by more than the 95 % interval of the
    difference. Standard errors are those of differences, paired by question.

    Args:
        losses: On at least two questions.
        costly: Names of recipes that compute tokens in every answer. At least one is not costly.
    """
    free = [name for name in losses if name not in costly]
    best = min(free, key=lambda name: losses[name].mean())
    chosen = next(name for name in free if _difference(losses, name, best) <= 1)
    for name in losses:
        if name in costly and _difference(losses, chosen, name) > _CONFIDENCE:
            chosen = name
    return chosen


def _difference(losses: Losses, name: str, other: str) -> float:
    """By how many standard errors the first loss is above the second; 0 if they are equal."""
    difference = losses[name] - losses[other]
    mean, error = difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))
    return float(mean / error) if error else math.copysign(math.inf, mean) if mean else 0.0
