"""Reading JSON Lines files and validating their records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.errors import DataError
from blockattn_rag.lab.json_lines import (
    list_of,
    not_blank,
    numbered_lines,
    of_kind,
    parse_line,
    required_text,
    value_of,
)


def test_skipped_blank_lines_count_as_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"1\n\n  \n2")
    assert list(numbered_lines(tmp_path / "a.jsonl")) == [(1, b"1\n"), (4, b"2")]


def test_gzip_is_detected_by_content_and_a_wrong_suffix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b"1\n"))
    assert list(numbered_lines(tmp_path / "a.jsonl")) == [(1, b"1\n")]
    (tmp_path / "b.jsonl.gz").write_bytes(b"1\n")
    with pytest.raises(
        DataError, match=r"b\.jsonl\.gz has the suffix \.gz, but is not a gzip file"
    ):
        list(numbered_lines(tmp_path / "b.jsonl.gz"))


def test_lines_before_the_damage_are_read(tmp_path: Path) -> None:
    lines = b"".join(b"%d\n" % number for number in range(10_000))
    (tmp_path / "a.gz").write_bytes(gzip.compress(lines)[:-2_000])
    found: list[tuple[int, bytes]] = []
    with pytest.raises(DataError, match=r"after line \d+: damaged gzip file"):
        found.extend(numbered_lines(tmp_path / "a.gz"))  # keeps the lines before the error
    assert len(found) > 100


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        list(numbered_lines(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"\xff\xfe", r"Invalid UTF-8 \(byte 0\)"),
        (b"{", "Invalid JSON"),
        (b"[" * 200_000, "nested too deeply|Invalid JSON"),
        (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
        (b"9" * 5_000, "Invalid JSON .*limit"),
    ],
    ids=["bytes", "cut", "open", "deep", "long number"],
)
def test_invalid_json_is_refused(line: bytes, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        parse_line(line)


def test_valid_values_are_returned_unchanged() -> None:
    record = {"text": " ä ", "list": [1, None], "none": [], "flag": False}
    assert parse_line(json.dumps(record, ensure_ascii=False).encode("utf-8-sig")) == record
    assert required_text(record, "text") == " ä "
    assert list_of(record, "list") == [1, None]
    assert list_of(record, "none", may_be_empty=True) == []
    assert of_kind(record["flag"], bool, "'flag'") is False


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "Missing key 'turns[1].text', found none"),
        ({"b": 1, "a": 2}, "Missing key 'turns[1].text', found 'a', 'b'"),
        ({"text": 3.5}, "Found a number for 'turns[1].text', expected a string"),
        ({"text": None}, "Found null for 'turns[1].text', expected a string"),
        ({"text": True}, "Found true or false for 'turns[1].text', expected a string"),
        ({"text": "\n "}, "Found an empty 'turns[1].text', expected text"),
    ],
)
def test_invalid_texts_are_refused_with_their_path(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as raised:
        required_text(record, "text", "turns[1].")
    assert str(raised.value) == message


def test_other_types_and_empty_lists_are_reported() -> None:
    with pytest.raises(DataError, match="Found a list for a record, expected an object"):
        of_kind([], dict, "a record")
    with pytest.raises(DataError, match="Found an object for 'a', expected a list"):
        list_of({"a": {}}, "a")
    with pytest.raises(DataError, match="Found an empty list 'a', expected"):
        list_of({"a": []}, "a")
    with pytest.raises(DataError, match=r"Found an empty answers\[0\], expected text"):
        not_blank("", "answers[0]")
    with pytest.raises(DataError, match="Missing key 'b'"):
        value_of({}, "b")
