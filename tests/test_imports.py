"""The house's rules on imports, walked file by file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import blockattn_rag

PACKAGE = Path(blockattn_rag.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Folder (or file) of the core: what it may import, itself aside. Lower floors first.
FLOORS = {
    "errors": "",
    "lazy": "",
    "files": "errors",
    "prompts": "errors files",
    "kv": "",
    "attention": "kv",
    "store": "errors kv",
    "model": "attention errors kv prompts",
    "engine": "errors kv model prompts store",
    "check": "engine kv model prompts",
    "adapters": "engine errors model prompts store",
}
FRAMEWORKS = {"llama_index", "langchain", "langchain_core", "langchain_chroma", "chromadb"}
# Where the seam to transformers is.
TRANSFORMERS_PARTS = {"model", "training", "check"}


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(file: Path) -> Iterator[str]:
    """Dotted names that a file imports, in functions too; those under TYPE_CHECKING left out."""
    package = ["blockattn_rag", *file.relative_to(PACKAGE).parent.parts]
    tree = ast.parse(file.read_text("utf-8"))
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, node.module or ""]).strip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def own_parts(file: Path) -> set[str]:
    names = (name.split(".") for name in imported(file))
    return {name[1] for name in names if name[0] == "blockattn_rag"} - {part_of(file)}


def test_imports_in_the_core_go_down_only() -> None:
    for file in FILES:
        part = part_of(file)
        if part in FLOORS:
            allowed = set(FLOORS[part].split())
            # The bundled model's place is asked for by name, when it is wanted.
            extra = {"demo"} if file.name == "loading.py" else set()
            assert own_parts(file) <= allowed | extra, file


def test_the_core_knows_no_framework_and_no_adapter() -> None:
    for file in FILES:
        if part_of(file) in FLOORS:
            roots = {name.split(".")[0] for name in imported(file)}
            assert not roots & FRAMEWORKS, file
            assert not own_parts(file) & {"llama_index", "langchain", "cli"}, file


def test_only_the_seam_knows_transformers() -> None:
    users = {
        part_of(file)
        for file in FILES
        for name in imported(file)
        if name.split(".")[0] == "transformers"
    }
    # The demo builds the bundled model, and evaluation random models of a real one's shape.
    assert users - {"demo", "evaluation"} <= TRANSFORMERS_PARTS


def test_only_the_command_line_imports_the_check() -> None:
    users = {file.relative_to(PACKAGE).as_posix() for file in FILES if "check" in own_parts(file)}
    assert users == {"cli/check.py"}


def test_adapters_do_not_import_one_another() -> None:
    for file in FILES:
        if part_of(file) == "llama_index":
            assert not own_parts(file) & {"langchain", "cli"}, file
        if part_of(file) == "langchain":
            assert not own_parts(file) & {"llama_index", "cli"}, file


def test_importing_the_package_loads_neither_torch_nor_a_framework() -> None:
    heavy = sorted({"torch", "transformers", "numpy", *FRAMEWORKS})
    code = (
        "import sys, blockattn_rag, blockattn_rag.prompts.blocks, blockattn_rag.store;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_all_names_resolve_and_no_other() -> None:
    assert blockattn_rag.__all__ == sorted(blockattn_rag.__all__)
    for name in blockattn_rag.__all__:
        assert getattr(blockattn_rag, name) is not None
    assert set(blockattn_rag._HOME_OF) == set(blockattn_rag.__all__) - {"__version__"}
    assert set(blockattn_rag.__all__) <= set(dir(blockattn_rag))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = blockattn_rag.nonsense


def test_names_for_type_checkers_are_the_lazy_ones() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    typed = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("blockattn_rag")
        for alias in node.names
    }
    assert typed == set(blockattn_rag._HOME_OF)
