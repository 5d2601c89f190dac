"""Vectors that need no download: hashed words, for demos and tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from sklearn.feature_extraction.text import HashingVectorizer


@cache
def _vectorizers(dimensions: int) -> tuple[HashingVectorizer, HashingVectorizer]:
    """Words, and pieces of words for what is spelled or inflected otherwise."""
    words = HashingVectorizer(n_features=dimensions, stop_words="english", norm="l2")
    pieces = HashingVectorizer(
        n_features=dimensions, analyzer="char_wb", ngram_range=(4, 5), norm="l2"
    )
    return words, pieces


def hashed_vectors(texts: Sequence[str], dimensions: int) -> list[list[float]]:
    """Counts of hashed words and word pieces, as unit vectors of ``dimensions`` numbers.

    Deterministic. Texts are near to one another as far as they share words, and no further.
    """
    words, pieces = (vectorizer.transform(texts) for vectorizer in _vectorizers(dimensions))
    vectors = (words + 0.5 * pieces).toarray()
    # A text without a single letter has no direction; all such texts share one.
    vectors[~vectors.any(axis=1), 0] = 1.0
    unit: list[list[float]] = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()
    return unit
