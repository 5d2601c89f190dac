from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from blockattn_rag.app.demo.corpus import is_correct
from recipes.bundled_model import corpus
from recipes.bundled_model.names import held_out_words
from recipes.bundled_model.scenes import QUESTION_KINDS, QuestionKind


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
            assert is_correct(sample, sample.answer)
            assert is_correct(sample, f"  {sample.answer.upper()}\n")
            assert not is_correct(sample, "I cannot say.")
            assert not is_correct(replace(sample, expected="21 metres"), "121 metres")


def test_a_comparison_is_wrong_if_the_loser_is_named() -> None:
    sample = corpus.generate_samples(1, "test", "comparison", 2, 1)[0]
    first, second = (sample.passages[i].title for i in sample.gold)
    head, end = sample.answer.rsplit(", so ", 1)
    swapped = end.replace(first, "?").replace(second, first).replace("?", second)
    assert not is_correct(sample, f"{head}, so {swapped}")


@pytest.mark.parametrize(("kind", "passages"), [("riddle", 2), ("comparison", 1), ("order", 1)])
def test_impossible_samples_are_refused(kind: QuestionKind, passages: int) -> None:
    with pytest.raises(ValueError, match="kind"):
        corpus.generate_samples(0, "test", kind, passages, 1)


def test_records_follow_the_schemas(tmp_path: Path) -> None:
    sample = corpus.generate_samples(1, "test", "order", 3, 1)[0]
    path = tmp_path / "eval.jsonl"
    assert corpus.write_jsonl(path, [corpus.evaluation_record(sample, "order-0")]) == 1
    record = json.loads(path.read_text(encoding="utf-8"))
    assert set(record) == {"id", "kind", "question", "answers", "passages"}
    assert sum(passage["gold"] for passage in record["passages"]) == 2
