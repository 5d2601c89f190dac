"""The benchmark scripts load: every name that they import exists."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("script", [path.stem for path in sorted(BENCHMARKS.glob("*.py"))])
def test_a_benchmark_loads(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / f"{script}.py"))
