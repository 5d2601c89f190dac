"""The campaign for GPUs, as far as a CPU can run it."""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "gpu"))

import harness
from harness import DONE, Campaign

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
