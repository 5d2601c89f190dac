"""What questions a result was made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockattn_rag.errors import DataError
from blockattn_rag.training.distillation.asked import (
    ASKED_FILE,
    question_digest,
    read_asked,
    write_asked,
)


def test_what_was_asked_is_known_whatever_its_case_and_not_told(tmp_path: Path) -> None:
    write_asked(tmp_path, ["How high?", "HOW HIGH? ", "How \ud800 long?"])
    assert read_asked(tmp_path) == {
        question_digest("how high?"),
        question_digest("How \ud800 long?"),
    }
    assert "high" not in (tmp_path / ASKED_FILE).read_text()


def test_what_an_earlier_fit_was_asked_is_handed_on_and_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    file = tmp_path / "kv" / "correction.safetensors"
    file.touch()
    write_asked(tmp_path / "kv", ["How high?"])
    write_asked(tmp_path, ["How long?"], read_asked(file))
    assert read_asked(tmp_path) == {question_digest("how high?"), question_digest("how long?")}
    (tmp_path / "link").symlink_to(file)
    assert read_asked(tmp_path / "link") == read_asked(tmp_path / "kv")
    assert read_asked("none") == read_asked("scale:0.9") == set()


def test_a_folder_without_the_file_tells_nothing_and_a_damaged_one_is_refused(
    tmp_path: Path,
) -> None:
    assert read_asked(tmp_path) == set()
    for text in ("{", "[[]]", "1"):
        (tmp_path / ASKED_FILE).write_text(text)
        with pytest.raises(DataError, match="is damaged"):
            read_asked(tmp_path)
