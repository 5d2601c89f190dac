"""Record files: writing, reading and validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import DataError
from blockattn_rag.lab.evaluation.accuracy import EvaluationRecord
from blockattn_rag.lab.evaluation.records import RecordFile, Row

LINES = """\
{"settings": {"model": "m", "limit": null}}
{"id": "q1", "digest": "00ff", "mode": "head:4", "question": "How high?", \
"answers": ["á", "b"], "output": "It is.", "accuracy": 1.0, "exact_match": 0.0, "f1": 0.5, \
"hits": 3, "misses": 1, "reused_tokens": 30, "computed_tokens": 12, \
"generated_tokens": 4, "finish_reason": "length", "recipe": "0a"}
"""
RECORD = EvaluationRecord(
    id="q1",
    digest="00ff",
    mode="head:4",
    question="How high?",
    answers=("á", "b"),
    output="It is.",
    accuracy=1.0,
    exact_match=0.0,
    f1=0.5,
    hits=3,
    misses=1,
    reused_tokens=30,
    computed_tokens=12,
    generated_tokens=4,
    finish_reason="length",
    recipe="0a",
)


def test_records_survive_a_round_trip(tmp_path: Path) -> None:
    settings = {"model": "m", "limit": None}
    RecordFile(tmp_path / "new.jsonl", settings, EvaluationRecord.from_dict).append([RECORD])
    assert (tmp_path / "new.jsonl").read_text("utf-8") == LINES
    assert RecordFile(tmp_path / "new.jsonl", settings, EvaluationRecord.from_dict).records == {
        ("q1", "head:4"): RECORD
    }


def test_records_of_another_recipe_are_refused(tmp_path: Path) -> None:
    full = replace(RECORD, mode="full", recipe="")
    path = tmp_path / "new.jsonl"
    RecordFile(path, {}, EvaluationRecord.from_dict).append([RECORD, full])
    sink = Row("head:4", Recipe("head:4"))
    with pytest.raises(DataError, match="records of 'head:4' with another recipe"):
        RecordFile(path, {}, EvaluationRecord.from_dict, rows=[Row("full"), sink])
    file = RecordFile(path, {}, EvaluationRecord.from_dict, rows=[Row("full"), Row("new")])
    assert [record.recipe for record in file.records.values()] == ["0a", ""]
