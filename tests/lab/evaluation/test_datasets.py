from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.errors import DataError
from blockattn_rag.lab.evaluation.datasets import read_samples
from tests.lab.evaluation.samples import record, write_jsonl


def test_records_are_read_in_order_from_plain_and_gzip_files(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "data.jsonl", [record(1), record(2)])
    zipped = tmp_path / "data.anything"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    samples = read_samples(plain)
    assert [s.id for s in samples] == ["q1", "q2"]
    assert samples[0].answers == ("100 metres",)
    assert [p.gold for p in samples[0].passages] == [False, False, True]
    assert read_samples(zipped) == samples
    assert read_samples(zipped, limit=1) == samples[:1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": " "}, "Found an empty 'question'"),
        ({"answers": "x"}, "Found a string for 'answers', expected a list"),
        ({"passages": [{"title": "t"}]}, r"Missing key 'passages\[0\].text'"),
        ({"passages": [{"title": "t", "text": "x", "gold": 1}]}, "expected true or false"),
        ({"question": "\ud800?"}, "Found a lone surrogate"),
    ],
)
def test_names_line_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [record(1), {**record(2), **change}])
    with pytest.raises(DataError, match=rf"line 2: .*{message}"):
        read_samples(path)


def test_duplicate_ids_and_empty_files_are_refused(tmp_path: Path) -> None:
    for records, message in ([], "is empty: expected one"), ([record(1)] * 2, "duplicate id"):
        with pytest.raises(DataError, match=message):
            read_samples(write_jsonl(tmp_path / "data.jsonl", records))


def test_reducing_passages_keeps_the_gold_one_and_the_order(tmp_path: Path) -> None:
    sample = read_samples(write_jsonl(tmp_path / "data.jsonl", [record(1)]))[0]
    assert [p.title for p in sample.with_passages(2).passages] == ["Other 1", "Tower 1"]
    assert [p.title for p in sample.with_passages(1).passages] == ["Tower 1"]
    assert sample.with_passages(9) == sample
    with pytest.raises(ValueError, match="Invalid num_passages 0: expected 1"):
        sample.with_passages(0)
