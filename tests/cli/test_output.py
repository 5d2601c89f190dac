from __future__ import annotations

import io

import pytest
from rich.console import Console

from blockattn_rag.cli.bench.report import spread
from blockattn_rag.cli.evaluate import _table
from blockattn_rag.cli.output import _width, duration, size
from blockattn_rag.evaluation import Interval, ModeResult


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
def test_durations_are_told_in_units_that_people_use(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_sizes_are_told_in_powers_of_1024() -> None:
    assert [size(n) for n in (12, 2048, 3 << 20, 5 << 30)] == [
        "12 B", "2.0 KiB", "3.0 MiB", "5.00 GiB",
    ]  # fmt: skip


def test_the_widest_table_of_eval_breaks_no_number_on_a_terminal_of_80_columns() -> None:
    whole = Interval(1.0, 1.0, 1.0)
    result = ModeResult(
        mode="block-composite", samples=500, accuracy=whole, exact_match=whole, f1=whole,
        difference=Interval(-0.125, -0.2, -0.1), agreement=1.0, ttft_s=0.123,
        hits=9, misses=1, reused_tokens=999, computed_tokens=1,
    )  # fmt: skip
    console = Console(width=80)
    with console.capture() as capture:
        console.print(_table("bundled on questions.jsonl", [result]))
    lines = [line for line in capture.get().splitlines() if line.strip(" ─╶╴")]
    assert len(lines) == 3  # title, columns, the row
    shown = ["block-composite", "100.0 (100.0-100.0)", "100.0", "-12.5", "123 ms", "99.9"]
    assert [cell in lines[2] for cell in shown] == [True] * len(shown)


def test_what_is_no_terminal_is_not_taken_for_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert _width() == 160
    monkeypatch.setenv("COLUMNS", "72")
    assert _width() is None
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert _width() is None


def test_a_spread_tells_its_unit_once_where_that_is_enough() -> None:
    row = {"copy_s": 0.101, "copy_min_s": 0.093, "copy_max_s": 0.177}
    assert spread(row, "copy") == "101 ms (93 - 177 ms)"
    assert spread(row | {"copy_max_s": 1.5}, "copy") == "101 ms (93 ms - 1.50 s)"
