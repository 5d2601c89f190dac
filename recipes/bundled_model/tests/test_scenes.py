from __future__ import annotations

import itertools
import random
import re

import pytest

from recipes.bundled_model.catalog import KINDS
from recipes.bundled_model.names import Split, held_out_words
from recipes.bundled_model.scenes import (
    QUESTION_KINDS,
    Article,
    QuestionKind,
    SceneWriter,
    turns_of,
    write_scene,
)

TOWER = KINDS[0]


def scenes(split: Split = "train", n: int = 50) -> list[list[Article]]:
    rng = random.Random(3)
    return [write_scene(rng, split, 6, second_editions=2) for _ in range(n)]


def test_training_text_holds_no_word_of_the_test_split() -> None:
    words = {
        word
        for scene in scenes()
        for article in scene
        for word in re.findall(r"\w+", f"{article.passage.title} {article.passage.text}")
    }
    assert words.isdisjoint(held_out_words())


def test_passages_state_their_facts_in_three_or_four_sentences() -> None:
    for scene in scenes():
        for article in scene:
            text = article.passage.text
            assert all(shown in text for shown in article.facts.values())
            assert len(re.findall(r"\.(?: |$)", text)) in (3, 4)
            assert article.name in text
            assert not text.startswith(article.name)


def test_some_passages_go_on_with_pronouns() -> None:
    texts = [article.passage.text for scene in scenes() for article in scene]
    share = sum(bool(re.search(r"\. (It|Its) ", text)) for text in texts) / len(texts)
    assert 0.1 < share < 0.4


def test_names_are_alike_as_often_as_asked() -> None:
    def shares(alike: float) -> float:
        """Return the share of towers that share a syllable with an earlier one in the scene."""
        found = total = 0
        for seed in range(60):
            writer = SceneWriter(random.Random(seed), "train", alike=alike)
            seen: list[str] = []
            for _ in range(5):
                word = writer.name(TOWER).removesuffix(" Tower")
                near = [w for w in seen if word[:2] == w[:2] or word[-2:] == w[-2:]]
                found, total = found + bool(near), total + bool(seen)
                seen.append(word)
            assert len(set(seen)) == 5
        return found / total

    assert shares(0.0) < 0.3 < 0.4 < shares(0.5) < 0.8
    assert shares(1.0) == 1


def test_a_pronoun_stands_for_the_name_in_the_sentence_before() -> None:
    for article in (article for scene in scenes() for article in scene):
        named = [article.name in s for s in re.split(r"(?<=\.) ", article.passage.text)]
        assert all(here or before for before, here in itertools.pairwise([False, *named]))


@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_an_answer_can_be_derived_from_its_gold_passages(kind: QuestionKind) -> None:
    rng = random.Random(4)
    for scene in scenes(n=20):
        for turn in turns_of(scene, rng, kind):
            gold = [scene[i] for i in turn.gold]
            assert all(article.name in turn.question for article in gold)
            if kind == "comparison":
                assert turn.expected == winner_by_reading(turn.answer, gold)
            else:
                assert turn.expected in scene[max(turn.gold)].passage.text
            assert turn.expected in turn.answer


def winner_by_reading(answer: str, gold: list[Article]) -> str:
    """Derive the clause about the winner from the numbers in the answer's first two sentences."""
    first, second, chain = re.split(r"(?<=\.) ", answer)
    numbers = [int(re.findall(r"\d+", sentence)[0]) for sentence in (first, second)]
    for article, number in zip(gold, numbers, strict=True):
        assert re.search(rf"\b{number}\b", article.passage.text)
    assert [int(n) for n in re.findall(r"\d+", chain)] == numbers
    winner = gold[numbers.index(max(numbers))]
    return chain[chain.index(winner.name) :].removesuffix(".")


def test_only_position_tells_which_edition_holds() -> None:
    rng = random.Random(5)
    for scene in scenes(n=20):
        swapped = scene[::-1]
        values = {(t.question, t.expected) for t in turns_of(scene, rng, "order")}
        for question, expected in values:
            others = [t for t in turns_of(swapped, rng, "order") if same(t.question, question)]
            assert all(t.expected != expected for t in others)


def same(a: str, b: str) -> bool:
    """Return whether two order questions ask for the same attribute of the same entity."""

    def key(question: str) -> str:
        return re.sub(r"\b(current|latest) | now\b", "", question)

    return key(a) == key(b)


def test_an_entity_with_two_editions_gets_order_questions_alone() -> None:
    rng = random.Random(6)
    for scene in scenes(n=20):
        names = [article.name for article in scene]
        twice = {name for name in names if names.count(name) == 2}
        for kind in ("one-passage", "comparison"):
            for turn in turns_of(scene, rng, kind):
                assert twice.isdisjoint(scene[i].name for i in turn.gold)
        for turn in turns_of(scene, rng, "order"):
            assert {scene[i].name for i in turn.gold} <= twice
