"""The test set of factual questions: properties of its data, and scoring."""

from __future__ import annotations

from collections import Counter

import pytest

from blockattn_rag.app.demo.corpus import records
from blockattn_rag.app.demo.facts import is_right, load

BY_ID, QUESTIONS = load().articles, load().questions
ARTICLES = list(BY_ID.values())


def test_articles_and_questions_are_unique_and_sized_as_documented() -> None:
    ids = [record["id"] for record in records("facts/articles")]
    assert len(set(ids)) == len(ids) == len(ARTICLES) == 40
    assert len({article.title for article in ARTICLES}) == len(ARTICLES)
    assert len({one.id for one in QUESTIONS}) == len(QUESTIONS) == 90
    assert len({one.question for one in QUESTIONS}) == len(QUESTIONS)
    assert sum(one.demo for one in QUESTIONS) == 12
    asked = Counter(one.article for one in QUESTIONS)
    assert asked.keys() == BY_ID.keys()
    assert set(asked.values()) == {2, 3}
    outside = {a.id: n for a in ARTICLES if not 80 <= (n := len(a.text.split())) <= 170}
    assert outside == {}


def test_the_gold_article_contains_the_first_accepted_answer() -> None:
    assert [q.id for q in QUESTIONS if not is_right(BY_ID[q.article].text, q.answers[:1])] == []


def test_no_other_article_contains_an_accepted_answer() -> None:
    found = {
        (question.id, article.id)
        for question in QUESTIONS
        for article in ARTICLES
        if article.id != question.article
        and is_right(f"{article.title}. {article.text}", question.answers)
    }
    assert found == set()


def test_no_question_contains_its_answer() -> None:
    assert [one.id for one in QUESTIONS if is_right(one.question, one.answers)] == []


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("330 m", True),
        ("It is 330 METRES high.", True),
        ("330\nmetres", True),
        ("330, as of today", True),
        ("1330 m", False),
        ("1,330 m", False),
        ("330.5 m", False),
        ("3300 m", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_contains_an_accepted_string(answer: str, right: bool) -> None:
    assert is_right(answer, ["330", "330 metres"]) is right


def test_complete_words_match_in_any_case() -> None:
    assert is_right("they were Pea plants", ["pea"])
    assert is_right("“CERN”", ["cern"])
    assert not is_right("peaks and peace", ["pea"])
    assert not is_right("Süssmayrs", ["Süssmayr"])
