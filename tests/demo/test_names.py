from __future__ import annotations

import random

from blockattn_rag.demo.names import FIRST, SECOND, Split, held_out_words, is_test_pair, pair_name


def drawn(split: Split, n: int = 5_000) -> set[str]:
    rng = random.Random(1)
    return {pair_name(rng, split) for _ in range(n)}


def test_no_word_belongs_to_both_splits() -> None:
    assert drawn("train").isdisjoint(drawn("test"))
    assert drawn("train").isdisjoint(held_out_words())
    assert drawn("test") <= held_out_words()


def test_a_word_tells_its_pair() -> None:
    words = [first + second for first in FIRST for second in SECOND]
    assert len(set(words)) == len(words)


def test_every_syllable_is_known_from_training() -> None:
    for i in range(len(FIRST)):
        assert not all(is_test_pair(i, j) for j in range(len(SECOND)))
    for j in range(len(SECOND)):
        assert not all(is_test_pair(i, j) for i in range(len(FIRST)))
