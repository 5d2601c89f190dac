"""Embeddings from hashed words, for demos and tests that download no model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import HashingVectorizer


@cache
def _vectorizers(dimensions: int) -> tuple[HashingVectorizer, HashingVectorizer]:
    """Vectorizers of words and of word pieces. Word pieces also match inflected words."""
    from sklearn.feature_extraction.text import HashingVectorizer  # This import takes a second.

    words = HashingVectorizer(n_features=dimensions, stop_words="english", norm="l2")
    pieces = HashingVectorizer(
        n_features=dimensions, analyzer="char_wb", ngram_range=(4, 5), norm="l2"
    )
    return words, pieces


def hashed_vectors(texts: Sequence[str], dimensions: int) -> list[list[float]]:
    """Counts of hashed words and word pieces, as unit vectors of ``dimensions`` numbers.

    The vectors are deterministic. Only texts that share words are similar.
    """
    words, pieces = (vectorizer.transform(texts) for vectorizer in _vectorizers(dimensions))
    vectors = (words + 0.5 * pieces).toarray()
    # A text without words would have a zero vector, so all such texts share one unit vector.
    vectors[~vectors.any(axis=1), 0] = 1.0
    unit: list[list[float]] = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()
    return unit
