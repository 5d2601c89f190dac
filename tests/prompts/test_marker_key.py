"""The marker key: generated once per installation, and never guessable."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from blockattn_rag.prompts import markers as marker_key

PROGRAM = "from blockattn_rag.prompts.markers import wrap; print(wrap('text'))"


def run(home: Path, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k != marker_key.KEY_VARIABLE}
    kept |= {"BLOCKATTN_RAG_HOME": str(home)} | environment
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=kept, check=True, capture_output=True, text=True).stdout


def test_processes_of_one_user_share_a_marker_key(tmp_path: Path) -> None:
    one = run(tmp_path / "one")
    assert run(tmp_path / "one") == one != run(tmp_path / "two")
    (file,) = (tmp_path / "one").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_machines_share_a_key_from_the_environment(tmp_path: Path) -> None:
    given = {marker_key.KEY_VARIABLE: "shared by all machines"}
    assert run(tmp_path / "one", **given) == run(tmp_path / "two", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_guessable_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        run(tmp_path, **{marker_key.KEY_VARIABLE: "short"})
    assert "has 5 characters, expected at least 16" in raised.value.stderr


def test_concurrent_threads_generate_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    both = threading.Barrier(2)

    def slow_key(size: int) -> bytes:
        made.append(size)
        time.sleep(0)  # lets the other thread run unless it is locked out
        return bytes(size)

    def ask() -> None:
        both.wait()
        marker_key.marker_key()

    monkeypatch.delenv(marker_key.KEY_VARIABLE)
    monkeypatch.setattr(marker_key, "_key_in", lambda _: slow_key(32))
    marker_key._found_key.cache_clear()
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    marker_key._found_key.cache_clear()
    assert made == [32]


def test_a_truncated_key_is_regenerated(tmp_path: Path) -> None:
    (tmp_path / "marker.key").write_bytes(b"short")
    assert run(tmp_path) == run(tmp_path)
    assert len((tmp_path / "marker.key").read_bytes()) == 32


def test_an_unwritable_key_is_valid_for_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert run(tmp_path / "file") != run(tmp_path / "file")
