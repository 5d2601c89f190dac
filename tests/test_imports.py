"""The layering rules for imports, checked for every file."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import blockattn_rag

PACKAGE = Path(blockattn_rag.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Folders and top-level files, and what they may import besides themselves. Lower floors first.
FLOORS = {
    "errors": "",
    "lazy": "",
    "files": "",
    "hub": "",
    "kv": "errors",
    "attention": "kv",
    "prompts": "errors files",
    "output": "errors lazy prompts",
    "store": "errors files kv lazy prompts",
    "model": "attention errors files hub kv lazy output prompts",
    "engine": "attention errors files kv lazy model output prompts store",
    "server": "attention engine errors files kv lazy model output prompts store",
    "check": "engine errors kv model prompts server",
    "adapters": "engine errors model output prompts server store",
    "llama_index": "adapters engine errors lazy model output prompts server store",
    "langchain": "adapters engine errors lazy output prompts server",
    "lab": "engine errors files kv lazy model prompts store",
    "app": (
        "adapters check engine errors files hub kv lab lazy llama_index model output prompts "
        "server store"
    ),
}
FRAMEWORKS = {"llama_index", "langchain", "langchain_core", "langchain_chroma", "chromadb"}
PUBLIC = ["", *(f".{name}" for name in ("prompts", "output", "kv", "store", "engine", "server",
                                        "llama_index", "langchain"))]  # fmt: skip
IMPORTED = {".prompts", ".output", ".kv"}
"""Packages that import their public names eagerly, so that they also have other names."""


def module_of(file: Path) -> str:
    parts = ("blockattn_rag", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def floor_of(module: str) -> str:
    """Return the folder or file in the package that contains a module. Empty for the package."""
    return [*module.split("."), ""][1]


def imported(file: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, including imports in functions and for types."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_modules(file: Path) -> set[str]:
    """Return the modules of this package that a file imports."""
    found = set()
    for name in imported(file):
        if name.split(".")[0] == "blockattn_rag":
            while name not in MODULES:
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {"blockattn_rag", module_of(file)}


def assert_no_circle(graph: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"Circular imports: {' -> '.join(error.args[1])}")


def test_every_folder_is_a_floor_and_imports_from_floors_below() -> None:
    floors = {floor_of(module) for module in MODULES} - {"", "__main__"}
    assert floors == FLOORS.keys()
    for module, file in MODULES.items():
        if floor := floor_of(module):
            found = {floor_of(name) for name in own_modules(file)} - {floor}
            allowed = set(FLOORS.get(floor, "app").split())
            assert found <= allowed, f"{module} imports {sorted(found - allowed)}"


def test_folders_and_files_have_no_circular_imports() -> None:
    assert_no_circle({floor: set(below.split()) for floor, below in FLOORS.items()})
    # The __init__ of a folder only exports names of its files, so it is skipped.
    files = {
        module: own_modules(file) for module, file in MODULES.items() if file.name != "__init__.py"
    }
    assert_no_circle(files)


@pytest.mark.parametrize(
    ("packages", "floors"),
    [
        (FRAMEWORKS, {"llama_index", "langchain", "app"}),
        ({"recipes", "benchmarks", "tests"}, set()),
        # The lab trains models, reads configs and creates random models. The engine checks a type.
        ({"transformers"}, {"model", "check", "engine", "lab"}),
    ],
)
def test_only_some_floors_import_a_package(packages: set[str], floors: set[str]) -> None:
    users = {
        floor_of(module)
        for module, file in MODULES.items()
        if packages & {name.split(".")[0] for name in imported(file)}
    }
    assert users <= floors


def test_importing_the_package_loads_neither_torch_nor_a_framework() -> None:
    heavy = sorted({"torch", "transformers", "numpy", *FRAMEWORKS})
    code = (
        "import sys, blockattn_rag, blockattn_rag.prompts, blockattn_rag.store,"
        "blockattn_rag.server.protocol, blockattn_rag.app.demo.corpus,"
        "blockattn_rag.llama_index, blockattn_rag.langchain;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", PUBLIC)
def test_packages_have_exactly_their_public_names(name: str) -> None:
    package = importlib.import_module(f"blockattn_rag{name}")
    assert len(set(package.__all__)) == len(package.__all__)
    for public in package.__all__:
        assert getattr(package, public) is not None
    names = set(dir(package))
    assert names >= set(package.__all__) if name in IMPORTED else names == set(package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = package.nonsense


def test_public_names_are_imported_for_type_checkers() -> None:
    for name in PUBLIC:
        package = importlib.import_module(f"blockattn_rag{name}")
        assert package.__file__ is not None
        typed = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(Path(package.__file__).read_text("utf-8")))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("blockattn_rag")
            for alias in node.names
        }
        assert set(package.__all__) - typed <= {"__version__", "open_store"} | {
            public for public in package.__all__ if public.startswith("DEFAULT_")
        }
