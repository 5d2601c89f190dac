from __future__ import annotations

import time
from dataclasses import replace

import pytest
from rich.console import Console

from blockattn_rag.app.cli.evaluate import accuracy_table
from blockattn_rag.app.cli.output import (
    count,
    duration,
    fail,
    note,
    output_width,
    plain,
    show,
    size,
    table,
)
from blockattn_rag.app.cli.progress import stages, waiting
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.lab.evaluation.accuracy import ModeResult
from blockattn_rag.lab.evaluation.metrics import Interval


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.0042, "4.2 ms"),
        (0.35, "350 ms"),
        (12.345, "12.35 s"),
        (400, "6.7 min"),
        (20_000, "5.6 h"),
        (353_944.74, "4.1 days"),
    ],
)
def test_durations_have_readable_units(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_sizes_are_in_powers_of_1024() -> None:
    assert [size(n) for n in (12, 2048, 3 << 20, 5 << 30)] == [
        "12 B", "2.0 KiB", "3.0 MiB", "5.00 GiB",
    ]  # fmt: skip


def test_count_uses_the_singular_for_one() -> None:
    assert [count(n, "block") for n in (0, 1, 2_000)] == ["0 blocks", "1 block", "2,000 blocks"]


HOSTILE = "\x1b]0;owned\x07 a\rb \x9b2J \u202ecod\u2069 \udcff"
ESCAPED = r"\x1b]0;owned\x07 a\rb \x9b2J \u202ecod\u2069 \udcff"


def test_control_characters_are_escaped_wherever_text_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockattn_rag.app.cli.output.stdout", Console(width=160))
    monkeypatch.setattr("blockattn_rag.app.cli.output.stderr", Console(width=160, stderr=True))
    assert plain(HOSTILE) == ESCAPED
    assert plain("Straße\t東京 [bold]\n") == "Straße\t東京 [bold]\n"
    fail(HOSTILE)
    note(HOSTILE)
    show(HOSTILE, table(HOSTILE, ("a",), [(HOSTILE,)]))
    shown = capsys.readouterr()
    assert [shown.err.count(ESCAPED), shown.out.count(ESCAPED)] == [2, 3]
    assert not {"\x1b", "\x07", "\r", "\x9b"} & set(shown.out + shown.err)


def test_emoji_codes_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    code = "[:smile:].txt"
    note(code)
    show(code, table(code, ("a",), [(code,)]))
    shown = capsys.readouterr()
    assert [shown.err.count(code), shown.out.count(code)] == [1, 3]


def test_the_widest_eval_table_fits_into_80_columns_without_splitting_numbers() -> None:
    whole = Interval(1.0, 1.0, 1.0)
    result = ModeResult(
        mode="block-composite", samples=500, accuracy=whole, exact_match=whole, f1=whole,
        difference=Interval(-0.125, -0.2, -0.1), agreement=1.0, cut_off=9,
        stats=ReuseStats("block", hits=9, misses=1, reused_tokens=999, computed_tokens=1),
    )  # fmt: skip
    failed = replace(result, stats=ReuseStats("block"))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(accuracy_table("bundled on questions.jsonl", [result, failed]))
    lines = [line for line in capture.get().splitlines() if line.strip(" ─")]
    assert len(lines) == 4  # title, column names, two rows
    assert lines[3].split()[-1] == "-"  # no prompt was answered
    shown = ["block-composite", "100.0 (100.0-100.0)", "100.0", "-12.5", "99.9"]
    assert [cell in lines[2] for cell in shown] == [True] * len(shown)


class Clock:
    """Clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("blockattn_rag.app.cli.progress.time.monotonic", found.monotonic)
    return found


def test_a_long_stage_reports_the_remaining_time(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with stages() as report:
        for done, seconds in ((100, 0), (101, 1), (150, 25), (160, 5), (200, 20)):
            clock.now += seconds
            report("encoding", done, 200)
        report("adding", 0, 1)
        report("adding", 1, 1)
    assert capsys.readouterr().err.splitlines() == [
        "encoding (200)",
        "encoding: 150 of 200 after 26.00 s, about 26.00 s left",
        "encoding: 200 of 200 in 51.00 s",
        "adding (1)",
    ]


def test_no_remaining_time_is_shown_after_the_first_item(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with stages() as report:
        for done, seconds in ((0, 0), (1, 60), (100, 30), (200, 30), (200, 5)):
            clock.now += seconds
            report("encoding", done, 200)
    assert capsys.readouterr().err.splitlines() == [
        "encoding (200)",
        "encoding: 1 of 200 after 60.00 s",
        "encoding: 100 of 200 after 90.00 s, about 90.00 s left",
        "encoding: 200 of 200 in 120.00 s",
    ]


def test_progress_bars_are_shown_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Console(width=100, stderr=True, force_terminal=True)
    monkeypatch.setattr("blockattn_rag.app.cli.progress.stderr", terminal)
    with stages() as report:
        report("encoding", 5, 10)
    shown = capsys.readouterr().err
    assert "encoding" in shown
    assert "5/10" in shown
    assert "left:" in shown


def test_a_long_wait_is_reported(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("loading"):
        clock.now += 1
    assert capsys.readouterr().err == ""
    with waiting("loading"):
        clock.now += 3
    assert capsys.readouterr().err == "loading: 3.00 s\n"


def test_reports_waits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockattn_rag.app.cli.progress.PATIENCE_S", 0.01)
    with waiting("loading"):
        time.sleep(0.3)
        assert capsys.readouterr().err == "loading ...\n"


@pytest.mark.parametrize(
    ("terminal", "columns", "width"),
    [(None, "", 160), (None, "wide", 160), (None, "72", None), (1, "", None), (2, "", None)],
)
def test_tables_are_not_limited_to_80_columns_if_the_width_is_unknown(
    terminal: int | None, columns: str, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.isatty", lambda fd: fd == terminal)
    monkeypatch.setenv("COLUMNS", columns)
    assert output_width() == width


def test_long_paths_wrap_and_numbers_do_not() -> None:
    path = "/home/somebody/projects/documents/databases/mydb/recipe"
    numbers = ["100.0", "99.5", "-12.5", "97.5", "123 ms", "99.9", "0.1234"]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table("t", ("recipe", *"abcdefg"), [(path, *numbers)]))
    shown = capture.get()
    assert [number in shown for number in numbers] == [True] * len(numbers)
    folded = [line.split("  ")[0] for line in shown.splitlines()[3:]]
    assert "".join(folded) == path


def test_titles_do_not_wrap() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table("/a/path/that/is/longer/than/the/table", ("a",), [("1",)]))
    assert capture.get().splitlines()[0].rstrip() == "/a/path/that/is/longer/than/the/table"
