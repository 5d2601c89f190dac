"""The GPU campaign, as far as it can be tested on a CPU."""

from __future__ import annotations

import runpy
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "gpu"))

import correctness
import expected
import harness
from harness import DONE, UNFINISHED, Campaign, Case

GPU = Path(__file__).parents[1] / "benchmarks" / "gpu"


@pytest.mark.parametrize("step", harness.STEPS)
def test_a_dry_run_measures_and_reports_every_case(step: str, tmp_path: Path) -> None:
    with pytest.raises(typer.Exit) as ended:
        runpy.run_path(str(GPU / "__main__.py"))["main"]([step], out=tmp_path, dry=True)
    assert ended.value.exit_code == DONE
    records = harness.read_records(tmp_path, step)
    cases = import_module(step).cases(Campaign(tmp_path, dry=True))
    assert [one["case"] for one in records] == [case.name for case in cases]
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "Dry run" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > 2


def test_steps_share_the_time_and_resume_from_earlier_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ran = SimpleNamespace(now=0.0), list[str]()
    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    monkeypatch.setattr(harness, "time", fake)

    def measure(name: str, seconds: float) -> dict[str, Any]:
        ran.append(name)
        clock.now += seconds
        return {}

    def cases(step: str, seconds: float, count: int) -> list[Case]:
        names = [f"{step} {number}" for number in range(count)]
        return [Case(name, partial(measure, name, seconds)) for name in names]

    steps = {"correctness": partial(cases, "a", 50, 6), "first_token": partial(cases, "b", 30, 2)}
    first = Campaign(tmp_path / "first", dry=True).run_all(steps, minutes=4)
    assert ran == ["a 0", "a 1", "a 2", "b 0", "b 1", "a 3"]
    assert first == UNFINISHED
    ran.clear()
    later = Campaign(tmp_path / "later", tmp_path / "first", dry=True)
    assert later.run_all(steps, minutes=4) == DONE
    assert ran == ["a 4", "a 5"]


def test_a_wrong_rotation_fails_the_first_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = vars(correctness)["rotate_into"]

    def wrong_after_16_keys(out: Any, *rest: Any) -> None:
        right(out, *rest)
        out[:, 16:] += 0.1

    monkeypatch.setattr(correctness, "ROTATED_TOKENS", (17,))
    case = next(iter(correctness.cases(Campaign(tmp_path, dry=True))))
    assert case.name.startswith("rotation")
    assert case.measure()["passed"]
    monkeypatch.setattr(correctness, "rotate_into", wrong_after_16_keys)
    assert not case.measure()["passed"]


def test_measured_times_are_not_below_the_expected_ones() -> None:
    results = harness.results_of([expected.RESULTS], "first_token")
    rows = [row for row in expected.expectations(results) if row.measured_s is not None]
    assert len(rows) > 10
    assert all(row.measured_s > row.expected_s for row in rows if row.measured_s is not None)
