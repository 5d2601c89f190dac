from __future__ import annotations

from dataclasses import replace

import pytest

from blockattn_rag.app.demo import corpus
from blockattn_rag.app.demo.corpus import CorpusQuestion

SAMPLES = [
    *corpus.bundled_samples("one-passage", 3, "train")[:10],
    *corpus.bundled_samples("one-passage", 3)[:10],
    *corpus.bundled_samples("order", 5)[:10],
]
COMPARISONS = [q for q in corpus.bundled_questions() if q.kind == "comparison"]


def test_expected_answers_are_right_and_others_are_wrong() -> None:
    for sample in [*SAMPLES, *corpus.bundled_questions()]:
        assert corpus.is_correct(sample, sample.answer)
        assert corpus.is_correct(sample, f"  {sample.answer.upper()}\n")
        assert not corpus.is_correct(sample, "I cannot say.")
        assert not corpus.is_correct(replace(sample, expected="21 metres"), "121 metres")


@pytest.mark.parametrize("sample", COMPARISONS, ids=lambda sample: sample.expected)
def test_a_comparison_is_wrong_if_the_loser_is_named(sample: CorpusQuestion) -> None:
    first, second = (corpus.bundled_corpus()[i].title for i in sample.gold)
    head, end = sample.answer.rsplit(", so ", 1)
    swapped = end.replace(first, "?").replace(second, first).replace("?", second)
    assert not corpus.is_correct(sample, f"{head}, so {swapped}")


def test_the_bundled_corpus_answers_the_bundled_questions() -> None:
    passages, questions = corpus.bundled_corpus(), corpus.bundled_questions()
    titles = [passage.title for passage in passages]
    assert 100 <= len(titles) <= 200
    assert len(set(titles)) == len(titles)
    assert len(questions) >= 12
    assert {question.kind for question in questions} == {"one-passage", "comparison"}
    for question in questions:
        named = [i for i, passage in enumerate(passages) if passage.title in question.question]
        assert sorted(question.gold) == named
        assert len(named) == (2 if question.kind == "comparison" else 1)
        if question.kind == "one-passage":
            assert question.expected in passages[named[0]].text


@pytest.mark.parametrize(
    ("kind", "num_passages", "split", "count"),
    [
        ("one-passage", 3, "train", 160),
        ("one-passage", 3, "test", 100),
        ("one-passage", 5, "test", 60),
        ("order", 5, "test", 60),
    ],
)
def test_last_gold_passage_has_answer(kind: str, num_passages: int, split: str, count: int) -> None:
    samples = corpus.bundled_samples(kind, num_passages, split)
    assert len({sample.passages for sample in samples}) == len(samples) == count
    for sample in samples:
        assert (sample.kind, len(sample.passages)) == (kind, num_passages)
        gold = [sample.passages[i] for i in sorted(sample.gold)]
        assert all(passage.title in sample.question for passage in gold)
        assert sample.expected in gold[-1].text


def test_no_test_sample_is_about_an_entity_of_a_training_sample() -> None:
    def titles(split: str) -> set[str]:
        samples = corpus.bundled_samples("one-passage", 3, split)
        return {passage.title for sample in samples for passage in sample.passages}

    assert titles("test").isdisjoint(titles("train"))


def test_samples_missing_from_the_package_raise_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="test-riddle-3"):
        corpus.bundled_samples("riddle", 3)
