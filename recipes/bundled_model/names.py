"""Invented two-syllable names, some of which are reserved for test entities.

A name is a *pair* (first syllable, second syllable). A fixed fifth of all pairs is reserved for the
test split. Every syllable therefore occurs in training, but no test name does: a model can answer
questions about test entities only from the passages, not from memory.
"""

from __future__ import annotations

import random
from typing import Literal

Split = Literal["train", "test"]

_FIRST = (
    "Hal Mor Bre Tal Vin Kar Sol Dra Fen Gri Lu Nor Pel Quo Ras Sta Tor Ul Ver Wes "
    "Yar Zel Ash Bol Cor Dun El Fal Gar Hin Is Jor Kel Lor Mal Nim Or Pra Rud Sil "
    "Tam Ur Vos Wil Xan Yel Zan Ber Cal Dor Em Fro Gul Hes In Jas Kor Lan Mir Nes"
)
_SECOND = (
    "den vale sund mark ring to wick ley dor mere bach lin gar mund nia ros ven sel tan "
    "burg das fell ham ira jan kas lund mos nell ost pol rak sta thal una vik wen xis yor zen "
    "bela cey dun eth fro gil hart ion jo keld lam min nock ola pin ruda sy tel uma vra"
)

FIRST = tuple(_FIRST.split())
SECOND = tuple(_SECOND.split())


def is_test_pair(first: int, second: int) -> bool:
    """Return whether a pair of syllable indices belongs to the test split (one pair in five)."""
    return (7 * first + 3 * second) % 5 == 0


def pair_name(rng: random.Random, split: Split) -> str:
    """Draw a word, such as ``Halden``, from the split's pairs."""
    while True:
        first, second = rng.randrange(len(FIRST)), rng.randrange(len(SECOND))
        if is_test_pair(first, second) == (split == "test"):
            return FIRST[first] + SECOND[second]


_PAIRS = {f + s: (i, j) for i, f in enumerate(FIRST) for j, s in enumerate(SECOND)}


def alike_name(rng: random.Random, split: Split, word: str) -> str:
    """Draw a word from the split that shares its first or second syllable with ``word``."""
    first, second = _PAIRS[word]
    while True:
        pair = rng.choice(
            ((first, rng.randrange(len(SECOND))), (rng.randrange(len(FIRST)), second))
        )
        if is_test_pair(*pair) == (split == "test"):
            return FIRST[pair[0]] + SECOND[pair[1]]


def ending_of(word: str) -> str:
    """Return the second syllable of a word."""
    return SECOND[_PAIRS[word][1]]


def held_out_words() -> frozenset[str]:
    """Return all words that are reserved for the test split."""
    return frozenset(
        first + second
        for i, first in enumerate(FIRST)
        for j, second in enumerate(SECOND)
        if is_test_pair(i, j)
    )
