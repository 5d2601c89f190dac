"""The Makefile detects problems of an installation before it changes anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Fake interpreter that records its arguments. OLD makes its version too old, CUDA simulates CUDA
# libraries, and OFFLINE makes the index of CPU builds unreachable.
INTERPRETER = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  -c*) [ -z "$OLD" ];;
  --version) echo "Python 3.10.13";;
  *--dry-run*) [ -z "$CUDA" ] || echo "Would install nvidia-cublas-12.8 torch-2.13.0";;
  *--index-url*) [ -z "$OFFLINE" ];;
esac
"""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """File with the recorded calls of the interpreter in ``tmp_path/venv``."""
    interpreter = tmp_path / "venv/bin/python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(INTERPRETER, encoding="utf-8")
    interpreter.chmod(0o755)
    return tmp_path / "calls"


def make(calls: Path, *arguments: str, **settings: str) -> tuple[int, str, list[str]]:
    """Run make. Returns exit status, stderr, and the arguments of ``pip install`` and ``venv``."""
    inherited = {"TORCH_INDEX", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS"}  # set by `make test`
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, env={**environment, "CALLS": str(calls), **settings},
        capture_output=True, text=True,
    )  # fmt: skip
    lines = calls.read_text("utf-8").splitlines()
    return done.returncode, done.stderr, [line for line in lines if line.startswith("-m")]


def test_an_old_python_is_reported_before_an_environment_is_created(calls: Path) -> None:
    old, venv = calls.parent / "venv/bin/python", calls.parent / "new"
    status, errors, ran = make(calls, f"{venv}/.demo", f"PYTHON={old}", f"VENV={venv}", OLD="1")
    assert status != 0
    assert "expected Python 3.11 or newer, found Python 3.10.13" in errors
    assert "PYTHON=python3.12" in errors
    assert ran == []


def test_torch_is_installed_from_the_given_index(calls: Path) -> None:
    venv = calls.parent / "venv"
    index = "TORCH_INDEX=https://index.example"
    status, _, ran = make(calls, f"{venv}/.demo", f"VENV={venv}", index)
    assert status == 0
    assert ran[0].endswith("--no-deps --index-url https://index.example torch")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="needs a machine without a GPU")
@pytest.mark.parametrize("offline", ["", "1"])
def test_cuda_torch_of_pypi_is_the_last_resort(calls: Path, offline: str) -> None:
    venv = calls.parent / "venv"
    status, _, ran = make(calls, f"{venv}/.demo", f"VENV={venv}", CUDA="1", OFFLINE=offline)
    assert status == 0
    assert ran[1].endswith("--no-deps --index-url https://download.pytorch.org/whl/cpu torch")
    assert ran[2].endswith("-c constraints.txt torch")


def test_torch_without_cuda_is_installed_from_the_default_index(calls: Path) -> None:
    venv = calls.parent / "venv"
    status, _, ran = make(calls, f"{venv}/.demo", f"VENV={venv}")
    assert status == 0
    assert not any("--index-url" in line for line in ran)
