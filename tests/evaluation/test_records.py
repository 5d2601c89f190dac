"""Files of records: written as before, whatever shape a record has in memory."""

from __future__ import annotations

from pathlib import Path

from blockattn_rag.engine.results import ReuseStats
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
