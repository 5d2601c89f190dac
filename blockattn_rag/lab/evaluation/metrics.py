"""Accuracy metrics for short answers, and bootstrap intervals."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DRAWN_AT_ONCE = 1 << 20
_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)


def normalize_answer(text: str) -> str:
    """Normalize an answer as the SQuAD and NQ-Open evaluation scripts do (Rajpurkar et al. 2016):
    lower case, without ASCII punctuation and articles, single spaces. In contrast, a text of only
    articles and punctuation keeps them, because an empty text would match everything."""
    lowered = " ".join(text.lower().split())
    return " ".join(_ARTICLES.sub(" ", lowered.translate(_PUNCTUATION)).split()) or lowered


def contains_answer(output: str, answers: Sequence[str]) -> float:
    """Return 1.0 if any reference answer occurs in the output (both normalized), else 0.0.

    This is the accuracy of Block-Attention (Ma et al. 2025, section 3.1), and ``best_subspan_em``
    of Liu et al. 2023. It compares characters, not words, so "7" occurs in "1970".
    """
    found = normalize_answer(output)
    return float(any(normalize_answer(answer) in found for answer in answers))


def exact_match(output: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the output equals any reference answer (both normalized), else 0.0."""
    found = normalize_answer(output)
    return float(any(normalize_answer(answer) == found for answer in answers))


def f1_score(output: str, answers: Sequence[str]) -> float:
    """Return the highest F1 score of the output's words over the reference answers, in 0..1."""
    found, best = normalize_answer(output).split(), 0.0
    for answer in answers:
        expected = normalize_answer(answer).split()
        common = (Counter(found) & Counter(expected)).total()
        best = max(best, 2 * common / (len(found) + len(expected) or 1))
    return best


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "accuracy": contains_answer,
    "exact_match": exact_match,
    "f1": f1_score,
}


class Interval(NamedTuple):
    """Mean with a 95 % confidence interval."""

    mean: float
    low: float
    high: float


def plain_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Convert statistics to plain JSON types. Intervals become ``{"mean", "low", "high"}``."""
    return {k: v._asdict() if isinstance(v, Interval) else v for k, v in figures.items()}


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """Return the mean of at least one value, with a 95 % bootstrap interval."""
    if not values:
        raise ValueError("Expected at least one value, found none")
    return bootstrap_ratio(values, np.ones(len(values)))


def bootstrap_ratio(
    numerators: Sequence[float] | np.ndarray, denominators: Sequence[float] | np.ndarray
) -> Interval:
    """Return the mean of the numerators over the mean of the denominators, with a 95 % interval.

    The interval is a percentile bootstrap (Efron 1979) with a fixed seed. Each numerator is drawn
    together with its denominator. The mean of the denominators must be positive; resamples in which
    it is not positive are discarded.
    """
    pairs = np.stack([numerators, denominators]).astype(np.float64)
    size = pairs.shape[1]
    rng = np.random.default_rng(0)
    # Computed in slices, because a matrix of resamples x samples might not fit in memory.
    rows = max(1, _DRAWN_AT_ONCE // size)
    counts = [min(rows, _RESAMPLES - start) for start in range(0, _RESAMPLES, rows)]
    drawn = [pairs[:, rng.integers(size, size=(n, size))].mean(axis=2) for n in counts]
    above, below = np.concatenate(drawn, axis=1)
    valid = below > 0
    low, high = np.quantile(above[valid] / below[valid], _QUANTILES)
    return Interval(float(pairs[0].mean() / pairs[1].mean()), float(low), float(high))
