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
import profiling
import report
import requirements
from harness import DONE, FAILED, UNFINISHED, Campaign, Case, Record

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


def test_failed_cases_are_repeated_last_and_stay_reported(tmp_path: Path) -> None:
    Campaign(tmp_path, dry=True).run("transfer", [Case("a", broken)])
    late = Campaign(tmp_path, dry=True, minutes=0)
    assert late.run("transfer", [Case("a", broken)]) == UNFINISHED
    assert [one["case"] for one in harness.read_records(tmp_path, "transfer")] == ["a"]
    cases = [Case("a", wrong), Case("b", lambda: result(1))]
    assert Campaign(tmp_path, dry=True).run("transfer", cases) == FAILED
    names = [one["case"] for one in harness.read_records(tmp_path, "transfer")]
    assert names == ["a", "b", "a"]


def test_a_step_that_runs_out_of_time_is_unfinished(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, dry=True, minutes=0)
    assert campaign.run("transfer", [Case("a", lambda: result(1))]) == UNFINISHED
    assert harness.read_records(tmp_path, "transfer") == []


def test_a_step_stops_when_the_gpu_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> Record:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(harness, "free_memory", lost)  # CUDA reports the error again
    cases = [Case("a", lost), Case("b", lambda: result(1))]
    assert Campaign(tmp_path, dry=True).run("transfer", cases) == FAILED
    assert [one["case"] for one in harness.read_records(tmp_path, "transfer")] == ["a"]


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "transfer.jsonl").write_text('{"case": "a"}\n{"case": "b', "utf-8")
    assert harness.read_records(tmp_path, "transfer") == [{"case": "a"}]


@pytest.mark.parametrize(
    ("relay_s", "expected"), [(0.028, ["met", "met", "met"]), (0.050, ["met", *["**missed**"] * 2])]
)
def test_goals_are_judged(relay_s: float, expected: list[str]) -> None:
    row = {"floor_s": 0.024, "relay_s": relay_s, "relay_over_copy": relay_s / 0.060}
    lines = report.goals({report.GOAL_CASE + "request": row})[2:-1]
    assert [line.split(" | ")[-1].removesuffix(" |") for line in lines] == expected


def test_the_step_that_is_farthest_from_its_limit_is_profiled() -> None:
    forward = {"relay_s": 0.03, "relay_limit_s": 0.01}
    results = {"8b/4096/forward": forward, "1b/4096/decode": {"relay_s": 0.02, "limit_s": 0.004}}
    assert profiling.slowest(results) == ("1b", 4096, "decode", 5.0)
    assert profiling.slowest({}) == ("8b", 32768, "forward", None)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void flash::flash_fwd_splitkv_kernel<bf16>", "attention"),
        ("nvjet_tst_128x64_bz_NNT", "matrix products"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::CatArrayBatchedCopy<bf16>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
    ],
)
def test_kernels_are_grouped_by_name(kernel: str, group: str) -> None:
    assert profiling.group_of(kernel) == group


def script(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(GPU / "campaign.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **settings},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "settings", "reason"),
    [
        ((), {}, "expected wheels, setup, all, report or a step: correctness"),
        (("transfer", "speed"), {}, "unknown step 'speed'"),
        (("wheels",), {"PACKAGES": "nonsense"}, "found no nonsense in constraints.txt"),
    ],
)
def test_the_script_refuses_wrong_arguments(
    arguments: tuple[str, ...], settings: dict[str, str], reason: str
) -> None:
    done = script(*arguments, **settings)
    assert done.returncode == 2
    assert reason in done.stderr


def test_the_script_passes_settings_to_every_step(tmp_path: Path) -> None:
    settings = {"PYTHON": "echo", "OUT": "o", "RESUME": "r", "MINUTES": "5", "DRY": "1"}
    done = script("setup", "all", "report", WHEELS=str(tmp_path), **settings)
    assert done.returncode == 0, done.stderr
    options = "--out o --minutes 5 --resume r --dry"
    expected = [f"benchmarks/gpu {step} {options}" for step in (*harness.STEPS, "report")]
    assert [line for line in done.stdout.splitlines() if "--out" in line] == expected


def test_the_script_fails_if_a_step_does() -> None:
    assert script("transfer", PYTHON="false").returncode == 1


def test_unmet_requirements_are_named() -> None:
    found = requirements.unmet(["pytest>=1", "pytest<1", "nonsense>=2"])
    assert found == [
        f"found {pytest.__version__}, expected pytest<1",
        "found nothing, expected nonsense>=2",
    ]
