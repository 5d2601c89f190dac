"""All benchmark scripts can be imported."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
IN_VLLM = ("served_recompute", "vllm_pool")


@pytest.mark.parametrize("script", [path.stem for path in sorted(BENCHMARKS.glob("*.py"))])
def test_a_benchmark_can_be_imported(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    if script in IN_VLLM:
        pytest.importorskip("vllm", reason="runs in the environment of make test-vllm")
    runpy.run_path(str(BENCHMARKS / f"{script}.py"))
