"""Embeddings from hashed words, for demos and tests without model downloads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def hashed_vectors(texts: Sequence[str], dimensions: int) -> list[list[float]]:
    """Embed texts as unit vectors of hashed words and character n-grams.

    The vectors are deterministic. Texts are similar if they share words or parts of words.
    """
    from sklearn.feature_extraction.text import HashingVectorizer  # Slow to import.

    words = HashingVectorizer(n_features=dimensions, stop_words="english")
    # Character n-grams also match inflected words.
    pieces = HashingVectorizer(n_features=dimensions, analyzer="char_wb", ngram_range=(4, 5))
    vectors = (words.transform(texts) + 0.5 * pieces.transform(texts)).toarray()
    # Texts without words would have a zero vector, so they all get the same unit vector.
    vectors[~vectors.any(axis=1), 0] = 1.0
    unit: list[list[float]] = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()
    return unit
