"""Choosing a setting: successive halving, then the simplest within one standard error.

Successive halving (Jamieson & Talwalkar 2016, 1502.07943) measures all candidates on a few samples,
keeps the better half, and doubles the samples. The one-standard-error rule (Breiman et al. 1984)
takes the simplest setting that the data cannot tell from the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.evaluation.calibration.settings import PLAIN, Setting, Stage

Losses = Mapping[Setting, NDArray[np.float64]]
"""Of each setting, its loss on each pair, ``[pairs]``, in the same order for all."""

Measure = Callable[[str, Sequence[Setting], int], Losses]
"""Losses of settings on the first so many pairs; the text says what is under way."""

START = 16
"""Pairs on which all candidates of a stage are measured."""

_RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class Choice:
    """What a search found.

    Args:
        setting: the simplest within one standard error of the best.
        finalists: the losses of all settings that were measured on all pairs.
        compared: how many settings were measured at all.
        stability: share of bootstrap resamples of the pairs in which the same setting is chosen.
    """

    setting: Setting
    finalists: Losses
    compared: int
    stability: float


def search(
    stages: Mapping[str, Stage], measure: Measure, total: int, *, start: int = START, seed: int = 0
) -> Choice:
    """Search stage by stage, each from the best setting so far.

    Args:
        stages: see ``settings.stages``.
        total: pairs that there are, at least 2.
        seed: of the bootstrap.
    """
    finalists: dict[Setting, NDArray[np.float64]] = {}
    seen: set[Setting] = set()
    best = PLAIN
    for name, stage in stages.items():
        candidates = list(dict.fromkeys([PLAIN, best, *stage(best)]))
        seen.update(candidates)

        def measure_stage(left: Sequence[Setting], count: int, name: str = name) -> Losses:
            return measure(f"{name}: {len(left)} settings", left, count)

        finalists.update(_halved(candidates, {PLAIN, best}, measure_stage, total, start))
        best = _best(finalists)
    chosen = simplest(finalists)
    share = _stability(finalists, chosen, total, seed)
    return Choice(chosen, finalists, len(seen), share)


def _halved(
    candidates: Sequence[Setting],
    kept: set[Setting],
    measure: Callable[[Sequence[Setting], int], Losses],
    total: int,
    start: int,
) -> Losses:
    """Losses on all pairs of the candidates that are left, and of those that are kept anyway."""
    left, count = list(candidates), min(start, total)
    found = measure(left, count)
    while count < total:
        ranked = sorted(left, key=lambda one: found[one].mean())
        better = {*ranked[: math.ceil(len(ranked) / 2)], *kept}
        left = [one for one in left if one in better]
        count = min(2 * count, total)
        found = measure(left, count)
    return found


def _best(found: Losses) -> Setting:
    return min(found, key=lambda one: found[one].mean())


def simplest(found: Losses) -> Setting:
    """The first in the order of cost, and of loss where that is equal, whose loss is at most one
    standard error above the lowest one; the standard error is that of the difference, paired by
    question."""
    best = _best(found)
    for one in sorted(found, key=lambda setting: (setting.cost, found[setting].mean())):
        difference = found[one] - found[best]
        error = difference.std(ddof=1) / math.sqrt(len(difference))
        if difference.mean() <= error:
            return one
    return best


def _stability(found: Losses, chosen: Setting, total: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    drawn: Iterable[NDArray[np.int64]] = rng.integers(total, size=(_RESAMPLES, total))
    again = [simplest({one: losses[rows] for one, losses in found.items()}) for rows in drawn]
    return sum(one == chosen for one in again) / _RESAMPLES
