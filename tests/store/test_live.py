"""Sets of handles: each once, in order, in memory and as a file that cannot be cut unnoticed."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from blockattn_rag.store import LiveHandles

HANDLES = [hashlib.sha256(bytes([i])).hexdigest()[:32] for i in range(50)]
SAME_START = [HANDLES[0][:16] + end for end in ("0" * 16, "8" + "0" * 15, "f" * 16)]


def test_it_holds_what_it_was_given_each_once_in_order() -> None:
    live = LiveHandles(iter([*HANDLES, *SAME_START, *HANDLES[:20]]))
    assert list(live) == sorted([*HANDLES, *SAME_START])
    assert len(live) == 53
    assert all(handle in live for handle in [*HANDLES, *SAME_START])


def test_it_holds_nothing_else() -> None:
    live = LiveHandles([*HANDLES[:20], *SAME_START])
    assert not any(handle in live for handle in HANDLES[20:])
    mixed = SAME_START[0][:16] + HANDLES[1][16:]  # halves of two that are there
    odd = ("", "x" * 32, HANDLES[0].upper(), HANDLES[0] + "0", 7, None)
    assert not any(handle in live for handle in (mixed, *odd))
    assert HANDLES[0] not in LiveHandles([])


def test_what_is_no_handle_is_refused() -> None:
    with pytest.raises(ValueError, match="32 hex digits, found 'abc'"):
        LiveHandles(["abc"])


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("handles", [HANDLES, []])
def test_a_file_gives_back_what_was_written(tmp_path: Path, handles: list[str]) -> None:
    live = LiveHandles(handles, looked_up=1790000000.25)
    again = LiveHandles.read(written(tmp_path / "live", *live.lines()))
    assert (list(again), again.looked_up) == (sorted(handles), 1790000000.25)


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    lines = list(LiveHandles(HANDLES).lines())
    for cut in (lines[:-1], lines[:1], [*lines[:-1], lines[-1][:-2]], [*lines[:10], lines[-1]]):
        with pytest.raises(ValueError, match=r"is truncated|expected a handle"):
            LiveHandles.read(written(tmp_path / "live", *cut))


def test_two_files_in_one_are_refused_and_not_taken_for_the_first(tmp_path: Path) -> None:
    two = [*LiveHandles(HANDLES[:2]).lines(), *LiveHandles(HANDLES[2:]).lines()]
    with pytest.raises(ValueError, match="pass each file with its own --handles"):
        LiveHandles.read(written(tmp_path / "live", *two))


def test_a_plain_list_is_as_old_as_its_file(tmp_path: Path) -> None:
    path = written(tmp_path / "live", HANDLES[0], "", HANDLES[1])
    os.utime(path, (1000, 1000))
    live = LiveHandles.read(path)
    assert (set(live), live.looked_up) == ({*HANDLES[:2]}, 1000.0)


def test_a_line_that_is_no_handle_is_shown_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path / "live", HANDLES[0], "not a handle")
    with pytest.raises(ValueError, match="found 'not a handle' after 1 handles"):
        LiveHandles.read(path)


def test_a_plain_list_from_a_program_is_as_old_as_now_or_as_told() -> None:
    before = time.time()
    live = LiveHandles.parse([HANDLES[0], f"{HANDLES[1]}\r\n", "\n"])
    assert set(live) == {*HANDLES[:2]}
    assert before <= live.looked_up <= time.time()
    assert LiveHandles.parse([HANDLES[0]], looked_up=5.0).looked_up == 5.0
    assert not len(LiveHandles.parse([]))


def test_a_plain_list_may_tell_its_number_which_is_checked() -> None:
    assert len(LiveHandles.parse([*HANDLES, "# end of 50 handles"])) == 50
    with pytest.raises(ValueError, match="a pipe is truncated: found 49 handles"):
        LiveHandles.parse([*HANDLES[:-1], "# end of 50 handles"], "a pipe")
