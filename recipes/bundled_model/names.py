"""Invented names made of two syllables, with the pairs that only test entities may use.

A name is a *pair* (first syllable, second syllable). A fixed fifth of all pairs is kept for
the test split, so every syllable is known from training while no test name ever was: a model
that answers about test entities reads the passages and recalls nothing.
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
    """Whether the pair of syllable numbers belongs to the test split (one pair in five)."""
    return (7 * first + 3 * second) % 5 == 0


def pair_name(rng: random.Random, split: Split) -> str:
    """One word such as ``Halden``, drawn from the split's own pairs."""
    while True:
        first, second = rng.randrange(len(FIRST)), rng.randrange(len(SECOND))
        if is_test_pair(first, second) == (split == "test"):
            return FIRST[first] + SECOND[second]


_PAIRS = {f + s: (i, j) for i, f in enumerate(FIRST) for j, s in enumerate(SECOND)}


def alike_name(rng: random.Random, split: Split, word: str) -> str:
    """A word of the split that has its first or its second syllable in common with ``word``."""
    first, second = _PAIRS[word]
    while True:
        pair = rng.choice(
            ((first, rng.randrange(len(SECOND))), (rng.randrange(len(FIRST)), second))
        )
        if is_test_pair(*pair) == (split == "test"):
            return FIRST[pair[0]] + SECOND[pair[1]]


def ending_of(word: str) -> str:
    """Its second syllable."""
    return SECOND[_PAIRS[word][1]]


def held_out_words() -> frozenset[str]:
    """Every word that only the test split may use."""
    return frozenset(
        first + second
        for i, first in enumerate(FIRST)
        for j, second in enumerate(SECOND)
        if is_test_pair(i, j)
    )
