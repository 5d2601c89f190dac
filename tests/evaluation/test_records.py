"""Files of records: written as before, whatever shape a record has in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.errors import DataError
from blockattn_rag.evaluation import EvaluationRecord, RecordFile

# Written before reuse figures were held as one object.
LINES = """\
{"settings": {"model": "m", "limit": null}}
{"id": "q1", "digest": "00ff", "mode": "block-composite", "kind": "even", "question": "How high?", \
"answers": ["á", "b"], "output": "It is.", "accuracy": 1.0, "exact_match": 0.0, "f1": 0.5, \
"hits": 3, "misses": 1, "reused_tokens": 30, "computed_tokens": 12, "generated_tokens": 4, \
"finish_reason": "length", "ttft_s": 0.125}
"""
RECORD = EvaluationRecord(
    id="q1",
    digest="00ff",
    mode="block-composite",
    kind="even",
    question="How high?",
    answers=("á", "b"),
    output="It is.",
    accuracy=1.0,
    exact_match=0.0,
    f1=0.5,
    stats=ReuseStats("block", 3, 1, 30, 12, generated_tokens=4, ttft_s=0.125),
    finish_reason="length",
)


def test_files_of_earlier_versions_are_read_and_written_byte_for_byte(tmp_path: Path) -> None:
    settings = {"model": "m", "limit": None}
    RecordFile(tmp_path / "new.jsonl", settings, EvaluationRecord.from_dict).append([RECORD])
    assert (tmp_path / "new.jsonl").read_text("utf-8") == LINES
    assert RecordFile(tmp_path / "new.jsonl", settings, EvaluationRecord.from_dict).records == {
        ("q1", "block-composite"): RECORD
    }


def test_records_tell_what_files_their_mode_named(tmp_path: Path) -> None:
    made = replace(RECORD, mode="reader=r", files="0a")
    path = tmp_path / "new.jsonl"
    RecordFile(path, {}, EvaluationRecord.from_dict).append([RECORD, made])
    file = RecordFile(path, {}, EvaluationRecord.from_dict)
    assert [record.files for record in file.records.values()] == ["", "0a"]
    file.check_files({"reader=r": "0a", "block-composite": "0b"})  # noted by an earlier version
    with pytest.raises(DataError, match="a file that the mode 'reader=r' names has changed since"):
        file.check_files({"reader=r": "0b"})
