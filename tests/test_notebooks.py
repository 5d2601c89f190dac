"""Checks of notebooks without running them. `make docs` runs them all, and fails if one fails.
Running them here would add minutes to every `make test`, and the gate would run them twice."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_cells(file: Path) -> list[Any]:
    cells = json.loads(file.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def own_imports(cells: list[Any]) -> Iterator[tuple[str, str]]:
    """Return the modules of the package that cells import, and the imported names."""
    for cell in cells:
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("blockattn_rag"):
                yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_has_no_outputs_and_asserts_its_claims(file: Path) -> None:
    cells = code_cells(file)
    assert cells
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    assert any("assert" in "".join(cell["source"]) for cell in cells)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_imports_of_a_notebook_exist(file: Path) -> None:
    imports = list(own_imports(code_cells(file)))
    assert imports
    for module, name in imports:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"
