"""The campaign for GPUs, as far as a CPU can run it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "gpu"))

import harness
from harness import DONE, FAILED, Campaign, Case, Record

GPU = Path(__file__).parents[1] / "benchmarks" / "gpu"


@pytest.mark.parametrize("step", harness.STEPS)
def test_a_dry_run_measures_and_reports_every_case(step: str, tmp_path: Path) -> None:
    with pytest.raises(typer.Exit) as ended:
        runpy.run_path(str(GPU / "__main__.py"))["main"](step, out=tmp_path, dry=True)
    assert ended.value.exit_code == DONE
    records = harness.read_records(tmp_path, step)
    cases = import_module(step).cases(Campaign(tmp_path, dry=True))
    assert [one["case"] for one in records] == [case.name for case in cases]
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "Dry run" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > 2


def result(value: int) -> Record:
    return {"value": value}


def out_of_memory() -> Record:
    raise torch.OutOfMemoryError("found 79 GiB\nand more")


def wrong() -> Record:
    return {"passed": False}


def broken() -> Record:
    raise ValueError("no such kernel")


def test_failed_cases_do_not_end_a_step_and_are_repeated(tmp_path: Path) -> None:
    cases = [
        Case("a", lambda: result(1)),
        Case("b", out_of_memory),
        Case("c", wrong),
        Case("d", broken),
        Case("e", lambda: result(2)),
    ]
    first = tmp_path / "first"
    assert Campaign(first, dry=True).run("transfer", cases) == FAILED
    records = harness.read_records(first, "transfer")
    outcomes = [harness.outcome_of(one) for one in records]
    assert outcomes == ["done", "out of memory", "wrong", "error", "done"]
    assert records[1]["out_of_memory"] == "found 79 GiB"
    assert "in broken" in records[3]["error"]

    def again() -> Record:
        raise AssertionError("a finished case is measured again")

    second = Campaign(tmp_path / "second", resume=first, dry=True)
    repeated = [Case(name, again) for name in "abe"] + [Case(n, lambda: result(3)) for n in "cd"]
    assert second.run("transfer", repeated) == DONE
    last = {one["case"]: one for one in harness.read_records(tmp_path / "second", "transfer")}
    assert sorted(last) == list("abcde")
    assert all(map(harness.is_finished, last.values()))


def script(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(GPU / "campaign.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **settings},
        capture_output=True,
        text=True,
    )


def test_the_script_passes_settings_to_every_step(tmp_path: Path) -> None:
    settings = {"PYTHON": "echo", "OUT": "o", "RESUME": "r", "MINUTES": "5", "DRY": "1"}
    done = script("setup", "all", "report", WHEELS=str(tmp_path), **settings)
    assert done.returncode == 0, done.stderr
    options = "--out o --minutes 5 --resume r --dry"
    expected = [f"benchmarks/gpu {step} {options}" for step in (*harness.STEPS, "report")]
    assert [line for line in done.stdout.splitlines() if "--out" in line] == expected
