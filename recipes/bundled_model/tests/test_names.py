from __future__ import annotations

import random

import pytest

from recipes.bundled_model.names import (
    FIRST,
    SECOND,
    Split,
    alike_name,
    held_out_words,
    is_test_pair,
    pair_name,
)


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


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_alike_word_has_a_syllable_of_the_other_and_keeps_to_its_split(split: Split) -> None:
    rng = random.Random(2)
    pairs = {f + s: (f, s) for f in FIRST for s in SECOND}
    firsts = seconds = 0
    for _ in range(500):
        word = pair_name(rng, split)
        alike = alike_name(rng, split, word)
        assert (alike in held_out_words()) == (split == "test")
        same = [a == b for a, b in zip(pairs[word], pairs[alike], strict=True)]
        assert any(same)
        firsts, seconds = firsts + same[0], seconds + same[1]
    assert min(firsts, seconds) > 200


def test_every_syllable_is_known_from_training() -> None:
    for i in range(len(FIRST)):
        assert not all(is_test_pair(i, j) for j in range(len(SECOND)))
    for j in range(len(SECOND)):
        assert not all(is_test_pair(i, j) for i in range(len(FIRST)))
