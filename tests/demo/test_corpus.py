from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from blockattn_rag.demo import corpus
from blockattn_rag.demo.names import ending_of, held_out_words
from blockattn_rag.demo.scenes import QUESTION_KINDS, QuestionKind


@pytest.mark.parametrize("kind", QUESTION_KINDS)
@pytest.mark.parametrize("num_passages", [2, 5, 10])
def test_samples_are_the_same_for_the_same_seed(kind: QuestionKind, num_passages: int) -> None:
    one = corpus.generate_samples(7, "test", kind, num_passages, 5)
    assert one == corpus.generate_samples(7, "test", kind, num_passages, 5)
    assert one != corpus.generate_samples(8, "test", kind, num_passages, 5)
    assert [len(sample.passages) for sample in one] == [num_passages] * 5


def test_test_samples_name_test_entities_alone() -> None:
    for kind in QUESTION_KINDS:
        for sample in corpus.generate_samples(1, "test", kind, 3, 10):
            for passage in sample.passages:
                words = set(re.findall(r"\w+", passage.title))
                assert words - {"Tower", "Company", "River", "Lake"} <= held_out_words()


def test_own_answers_are_right_and_others_wrong() -> None:
    for kind in QUESTION_KINDS:
        for sample in corpus.generate_samples(1, "test", kind, 2, 10):
            assert corpus.is_correct(sample, sample.answer)
            assert corpus.is_correct(sample, f"  {sample.answer.upper()}\n")
            assert not corpus.is_correct(sample, "I cannot say.")
            assert not corpus.is_correct(replace(sample, expected="21 metres"), "121 metres")


def test_a_comparison_is_wrong_if_the_loser_is_named() -> None:
    sample = corpus.generate_samples(1, "test", "comparison", 2, 1)[0]
    first, second = (sample.passages[i].title for i in sample.gold)
    head, end = sample.answer.rsplit(", so ", 1)
    swapped = end.replace(first, "?").replace(second, first).replace("?", second)
    assert not corpus.is_correct(sample, f"{head}, so {swapped}")


@pytest.mark.parametrize(("kind", "passages"), [("riddle", 2), ("comparison", 1), ("order", 1)])
def test_impossible_samples_are_refused(kind: QuestionKind, passages: int) -> None:
    with pytest.raises(ValueError, match="kind"):
        corpus.generate_samples(0, "test", kind, passages, 1)


def test_the_bundled_corpus_answers_the_bundled_questions() -> None:
    passages, turns = corpus.bundled_corpus(), corpus.bundled_questions()
    titles = [passage.title for passage in passages]
    assert 100 <= len(titles) <= 200
    assert len(set(titles)) == len(titles)
    assert len(turns) >= 12
    assert {turn.kind for turn in turns} == {"one-passage", "comparison"}
    for turn in turns:
        named = [p for p in passages if p.title in turn.question]
        assert len(named) == (2 if turn.kind == "comparison" else 1)
        if turn.kind == "one-passage":
            assert turn.expected in named[0].text


def test_records_follow_the_schemas(tmp_path: Path) -> None:
    sample = corpus.generate_samples(1, "test", "order", 3, 1)[0]
    path = tmp_path / "eval.jsonl"
    assert corpus.write_jsonl(path, [corpus.evaluation_record(sample, "order-0")]) == 1
    record = json.loads(path.read_text(encoding="utf-8"))
    assert set(record) == {"id", "kind", "question", "answers", "passages"}
    assert sum(passage["gold"] for passage in record["passages"]) == 2


def test_the_corpus_needs_no_torch() -> None:
    code = "import sys, blockattn_rag.demo.corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_halden_tower_is_as_tall_as_the_documentation_says() -> None:
    assert "214 metres" in corpus.bundled_corpus()[0].text
    assert corpus.bundled_corpus()[0].title == "Halden Tower"


def test_names_of_one_kind_of_the_bundled_corpus_do_not_rhyme() -> None:
    titles = [passage.title for passage in corpus.bundled_corpus()]
    for start in range(0, len(titles), corpus.ARTICLES_PER_KIND):
        names = titles[start : start + corpus.ARTICLES_PER_KIND]
        for words in zip(*(name.split() for name in names), strict=True):
            invented = [word for word in words if word in held_out_words()]
            assert len({ending_of(word) for word in invented}) == len(invented)
            assert len(invented) in (0, corpus.ARTICLES_PER_KIND)
