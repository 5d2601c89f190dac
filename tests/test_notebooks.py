"""Every notebook runs from top to bottom, offline, and its assertions hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
# As in the Makefile, for the pages of the documentation.
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(file: Path) -> Any:
    return nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]


@pytest.mark.timeout(1800)  # minutes, on a busy machine; this only ends what would hang
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_what_it_claims_holds_and_nothing_goes_to_stderr(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    notebook = read(file)
    NotebookClient(
        notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    # A page shows these in red boxes.
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_stored_without_outputs(file: Path) -> None:
    notebook = read(file)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert any("assert" in cell.source for cell in code)
