"""Choosing a recipe: the simplest within one standard error of the best, or the one in use.

The one-standard-error rule (Breiman et al. 1984) takes the simplest setting that the data cannot
distinguish from the best one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.lab.evaluation.fidelity import FidelityRecord

Losses = Mapping[str, NDArray[np.float64]]
"""Losses of recipes on the same questions, ``[questions]``, by name; the simplest recipe first."""


def loss_of(record: FidelityRecord) -> float:
    """The mean divergence, with the first token counted twice, as in the fit."""
    return (record.kl * record.tokens + record.first_kl) / (record.tokens + 1)


_CONFIDENCE = 1.96
"""Standard errors by which a recipe has to be better to cost tokens, or to replace another one."""


_FEW = 8
"""Questions below which the spread of a difference is too uncertain to replace a recipe in use."""


def choose(losses: Losses, costly: Collection[str] = (), in_use: str | None = None) -> str:
    """The simplest free recipe, unless the one in use is as good or a costly one clearly better.

    The simplest free recipe is the first whose loss is at most one standard error above the lowest
    one of these. "Clearly better" is a loss that is lower by more than the 95 % interval of the
    difference. Standard errors are those of differences, paired by question.

    Args:
        losses: On at least two questions.
        costly: Names of recipes that compute tokens in every answer. At least one is not costly.
        in_use: Name of the recipe in use, which is kept unless another is clearly better. Default:
            there is none.
    """
    free = [name for name in losses if name not in costly]
    best = min(free, key=lambda name: losses[name].mean())
    chosen = next(name for name in free if _difference(losses, name, best) <= 1)
    if in_use is not None and not _is_clearly_better(losses, chosen, in_use):
        chosen = in_use
    better = (name for name in losses if _is_clearly_better(losses, name, chosen))
    return next((name for name in better if name in costly), chosen)


def _is_clearly_better(losses: Losses, name: str, other: str) -> bool:
    return len(losses[name]) >= _FEW and _difference(losses, other, name) > _CONFIDENCE


def _difference(losses: Losses, name: str, other: str) -> float:
    """By how many standard errors the first loss is above the second; 0 if they are equal."""
    difference = losses[name] - losses[other]
    mean, error = difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))
    return float(mean / error) if error else math.copysign(math.inf, mean) if mean else 0.0
