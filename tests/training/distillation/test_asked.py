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


def test_a_folder_without_the_file_tells_nothing_and_a_damaged_one_is_refused(
    tmp_path: Path,
) -> None:
    assert read_asked(tmp_path) == set()
    for text in ("{", "[[]]", "1"):
        (tmp_path / ASKED_FILE).write_text(text)
        with pytest.raises(DataError, match="is damaged"):
            read_asked(tmp_path)
