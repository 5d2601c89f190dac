from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from blockattn_rag.files import is_temporary, replacing, temporary_name, write_json


def test_a_file_is_only_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        assert [is_temporary(other.name) for other in tmp_path.iterdir() if other != path] == [True]
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"x" * (1 // 0) if file.write(b"half") else b"")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_renaming_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"), replacing(tmp_path / "folder") as file:
        file.write(b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_writes_are_flushed_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        flushed.append("renamed" if (tmp_path / "file").exists() else "not renamed")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with replacing(tmp_path / "file"):
        pass
    assert flushed == ["file", "not renamed", "folder", "renamed"]
    flushed.clear()
    with replacing(tmp_path / "other", fsync=False):
        pass
    assert flushed == []


@pytest.mark.parametrize(("mode", "found"), [(0o666, 0o640), (0o600, 0o600)])
def test_new_files_follow_the_umask(tmp_path: Path, mode: int, found: int) -> None:
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "file", mode=mode):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == found


def test_temporary_names_are_recognized(tmp_path: Path) -> None:
    name = temporary_name(tmp_path / "file").name
    assert is_temporary(name)
    assert name != temporary_name(tmp_path / "file").name
    assert not is_temporary("file")
    assert not is_temporary(".file.tmp")


def test_json_is_indented_and_ends_with_a_newline(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"a": [1], "b": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1], "b": "é"}
    assert path.read_text(encoding="utf-8").startswith('{\n  "a": [\n')
    assert path.read_bytes().endswith(b"\n}\n")
