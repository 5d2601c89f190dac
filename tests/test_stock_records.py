"""Records of the benchmark of repairs, and its tables."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import pytest
import stock_records
from stock_records import Row

ROWS = [
    Row("1", "full", "ab12", 3, 0.0, 0.0, 1.0, 1.0, 0.5),
    Row("1", "block", "ab12", 3, 0.4, 0.2, 0.5, 0.0, 0.25),
    Row("1", "sink=head:4", "ab12", 3, 0.1, 0.1, 0.75),
    Row("2", "full", "ab12", 3, 0.0, 0.0, 1.0, 1.0, 0.5),
    Row("2", "block", "ab12", 3, 0.2, 0.2, 0.5, 1.0, 0.25),
]


def test_records_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    stock_records.append_rows(path, ROWS[:3], [])
    path.write_text(path.read_text(encoding="utf-8")[:-4], encoding="utf-8")
    known = stock_records.read_rows(path)
    assert known == ROWS[:2]
    stock_records.append_rows(path, ROWS[2:], known)
    assert stock_records.read_rows(path) == ROWS
    stock_records.append_rows(path, [replace(ROWS[2], id="2")], ROWS)
    assert stock_records.read_rows(path)[5:] == [replace(ROWS[2], id="2")]


def test_the_table_shows_what_full_mode_costs(tmp_path: Path) -> None:
    costs = tmp_path / "costs.csv"
    costs.write_text("mode,computed_tokens,ttft_s\nfull,760.2,5.125\n", encoding="utf-8")
    shown = list(stock_records.tables(ROWS, costs, ["block"]))
    all_ = "100 % (100 to 100)"
    full = f"| `full` | 2 | 0.000 (0.000 to 0.000) | 0.000 | {all_} | {all_} | 760 | 5.12 s |"
    assert shown[2] == full


def test_the_table_compares_each_mode_over_the_questions_that_both_were_asked(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.csv"
    stock_records.append_rows(path, ROWS, [])
    shown = list(stock_records.tables(stock_records.read_rows(path), None, []))
    assert "| `block` | 2 | 0.300 (0.200 to 0.400) | 0.200 | 50 % (50 to 50) |  |  |  |" in shown
    assert (
        "| `sink=head:4` | 1 | 0.100 (0.100 to 0.100) | 0.100 | 75 % (75 to 75) | 75 % (75 to 75) "
        "|  |  |" in shown
    )
    scores = "50.0 % (0.0 to 100.0) | -50.0 % (-100.0 to +0.0) | 25.0 % (25.0 to 25.0)"
    assert f"| `block` | 2 | {scores} | -25.0 % (-25.0 to -25.0) |" in shown
    assert not any(line.startswith("| `sink=head:4` | 0") for line in shown)


@pytest.mark.parametrize(("rows", "missing"), [([], "full, block"), (ROWS[2:3], "full, block")])
def test_a_table_names_the_rows_that_it_lacks(rows: list[Row], missing: str) -> None:
    with pytest.raises(ValueError, match=f"no rows of {missing};"):
        list(stock_records.tables(rows, None, []))
