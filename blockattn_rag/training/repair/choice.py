"""Choosing a recipe: the simplest within one standard error of the best.

The one-standard-error rule (Breiman et al. 1984) takes the simplest setting that the data cannot
distinguish from the best one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.evaluation.fidelity import FidelityRecord

Losses = Mapping[str, NDArray[np.float64]]
"""Losses of recipes on the same questions, ``[questions]``, by name; the simplest recipe first."""


def loss_of(record: FidelityRecord) -> float:
    """The mean divergence, with the first token counted twice, as in the fit."""
    return (record.kl * record.tokens + record.first_kl) / (record.tokens + 1)


def simplest(losses: Losses) -> str:
    """The first recipe whose loss is at most one standard error above the lowest one.

    The standard error is that of the difference, paired by question.

    Args:
        losses: On at least two questions.
    """
    best = min(losses, key=lambda name: losses[name].mean())
    for name, found in losses.items():
        difference = found - losses[best]
        if difference.mean() <= difference.std(ddof=1) / math.sqrt(len(difference)):
            return name
    return best
