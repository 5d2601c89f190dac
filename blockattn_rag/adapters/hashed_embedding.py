"""Embeddings from hashed words, for demos and tests without model downloads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import HashingVectorizer


@cache
def _vectorizers(dimensions: int) -> tuple[HashingVectorizer, HashingVectorizer]:
    """Vectorizers for words and for character n-grams, which also match inflected words."""
    from sklearn.feature_extraction.text import HashingVectorizer  # Slow to import.

    words = HashingVectorizer(n_features=dimensions, stop_words="english", norm="l2")
    pieces = HashingVectorizer(
        n_features=dimensions, analyzer="char_wb", ngram_range=(4, 5), norm="l2"
    )
    return words, pieces


def hashed_vectors(texts: Sequence[str], dimensions: int) -> list[list[float]]:
    """Embed texts as unit vectors with the counts of hashed words and character n-grams.

    The vectors are deterministic. Only texts with common words are similar.
    """
    words, pieces = (vectorizer.transform(texts) for vectorizer in _vectorizers(dimensions))
    vectors = (words + 0.5 * pieces).toarray()
    # Texts without words would have a zero vector, so they all get the same unit vector.
    vectors[~vectors.any(axis=1), 0] = 1.0
    unit: list[list[float]] = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()
    return unit
