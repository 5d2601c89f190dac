"""The state of a file tells whether it is still the one that was read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blockattn_rag.files.state import file_state


def test_a_file_that_stays_keeps_its_state(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    before = file_state(path)
    assert path.read_bytes() == b"one"
    assert file_state(path) == before


def test_another_file_of_the_same_size_and_time_has_another_state(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    for one, text in ((path, b"one"), (other, b"two")):
        one.write_bytes(text)
        os.utime(one, (1e9, 1e9))
    before = file_state(path)
    other.replace(path)
    assert path.stat().st_mtime == 1e9
    assert file_state(path) != before


def test_a_file_that_is_written_in_place_has_another_state(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    before = file_state(path)
    path.write_bytes(b"three")
    assert file_state(path) != before
    with pytest.raises(FileNotFoundError):
        file_state(tmp_path / "none")
