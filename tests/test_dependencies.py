"""The imports of the package match the dependencies in pyproject.toml."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import files, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "blockattn_rag"
# Packages of the repository, and benchmark scripts that import each other.
OWN = {"blockattn_rag", "recipes", "tests", "tests_vllm"} | {
    f.stem for f in (ROOT / "benchmarks").rglob("*.py")
}
FILES = sorted(PACKAGE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DISTRIBUTIONS = packages_distributions()

# Folders and files that may import the packages of an extra at the top level.
EXTRA_OF = {
    "adapters/hashed_embedding.py": "llama-index",  # the extra langchain also works
    "langchain": "langchain",
    "llama_index": "llama-index",
    "app/cli": "cli",
    "app/rag": "llama-index",
    "lab/trainer.py": "train",
    "lab/training": "train",
    "output": "structured",
    "langchain/served.py": "serving",
    "llama_index/served.py": "serving",
    "server/client.py": "serving",
    "server/vllm": "vllm",
}
# Modules that the gate does not install, and the distributions that contain them.
NOT_INSTALLED = {
    "fastapi": "fastapi", "flash_attn.cute": "flash-attn-4", "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn-3", "prometheus_client": "prometheus-client",
    "triton": "triton", "llama_index.embeddings.huggingface": "llama-index-embeddings-huggingface",
    "llama_cpp": "llama-cpp-python", "playwright": "playwright", "torchao": "torchao",
    "vllm": "vllm",
}  # fmt: skip
# Only imported for a HuggingFace embedding, a screenshot of the demo page, or a comparison with
# llama.cpp. The error message or the docstring of the script names the package to install.
ASKED_FOR_BY_MESSAGE = {"llama-cpp-python", "llama-index-embeddings-huggingface", "playwright"}
# The package works without these. PyTorch with CUDA installs Triton.
OPTIONAL = {"triton", "flash-attn-3"}
# Declared dependencies that no file imports, and why they are needed.
NEEDED_UNIMPORTED = {
    "bitsandbytes": "transformers imports it to quantize weights to 4 bits",
    "flash-attn": "attention/flash.py imports it by name",
    "flash-attn-4": "attention/flash.py imports it by name",
    "langchain-chroma": "the vector store in the guide for LangChain",
    "llama-index-readers-file": "SimpleDirectoryReader imports it to read PDF files",
}


def declared(requirements: list[str]) -> set[str]:
    """Return the names of distributions, including those in referenced extras of the project."""
    names: set[str] = set()
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                names |= declared(EXTRAS[extra])
        else:
            names.add(canonicalize_name(requirement.name))
    return names


BASE = declared(PROJECT["dependencies"])
# Only extras for users; the others are for development.
USED = BASE.union(*(declared(EXTRAS[name]) for name in EXTRAS.keys() - {"docs", "test", "all"}))


def code_of(file: Path) -> str:
    """Return the Python code of a module, or of all cells of a notebook."""
    text = file.read_text("utf-8")
    if file.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def modules(file: Path, *, at_import: bool = False) -> Iterator[str]:
    """Yield the dotted names of third-party modules that a file imports.

    Args:
        at_import: Whether to skip imports that are optional when the file is imported: those in
            functions, ``if`` (``TYPE_CHECKING``) and ``try``.
    """
    skipped = (ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try) if at_import else ()
    waiting: list[ast.AST] = [ast.parse(code_of(file))]
    while waiting:
        node = waiting.pop()
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if name.split(".")[0] not in sys.stdlib_module_names | OWN:
                yield name
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, skipped)]


@cache
def distribution_of(module: str) -> str:
    """Return the distribution that contains a module."""
    for known, name in NOT_INSTALLED.items():
        if f"{module}.".startswith(f"{known}."):
            return name
    names = set(DISTRIBUTIONS.get(module.split(".")[0], []))
    if len(names) > 1:
        path = module.replace(".", "/")
        names = {name for name in names if {f"{path}.py", f"{path}/__init__.py"} & files_of(name)}
    assert len(names) == 1, f"expected one distribution with {module}, found {sorted(names)}"
    return canonicalize_name(names.pop())


@cache
def files_of(distribution: str) -> set[str]:
    return {str(file) for file in files(distribution) or ()}


def users(paths: Iterable[Path], *, at_import: bool = False) -> dict[str, set[str]]:
    """Return the files that import each distribution."""
    found: dict[str, set[str]] = {}
    for file in paths:
        for module in modules(file, at_import=at_import):
            found.setdefault(distribution_of(module), set()).add(str(file.relative_to(ROOT)))
    return found


def without(found: dict[str, set[str]], allowed: set[str]) -> dict[str, set[str]]:
    return {name: users for name, users in found.items() if name not in allowed}


def test_imports_of_the_package_are_declared() -> None:
    assert without(users(FILES), USED | ASKED_FOR_BY_MESSAGE | OPTIONAL) == {}


def test_declared_dependencies_are_imported() -> None:
    imported = users(FILES).keys()
    assert sorted(USED - imported - NEEDED_UNIMPORTED.keys()) == []
    assert not NEEDED_UNIMPORTED.keys() & imported


def test_top_level_imports_only_need_the_extra_of_their_folder() -> None:
    for file in FILES:
        path = file.relative_to(PACKAGE)
        extra = next(
            (name for prefix, name in EXTRA_OF.items() if path.as_posix().startswith(prefix)), None
        )
        allowed = BASE | OPTIONAL | (declared(EXTRAS[extra]) if extra else set())
        assert without(users([file], at_import=True), allowed) == {}


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "recipes"])
def test_imports_of_the_repository_are_in_the_test_extra(folder: str) -> None:
    found = users((ROOT / folder).rglob("*.py"))
    found.pop("vllm", None)  # has its own environment
    assert without(found, BASE | declared(EXTRAS["test"]) | ASKED_FOR_BY_MESSAGE) == {}


def test_imports_of_the_notebooks_are_in_the_docs_extra() -> None:
    found = users((ROOT / "notebooks").glob("*.ipynb"))
    assert found.keys() >= {"matplotlib", "langgraph-checkpoint"}
    assert without(found, BASE | declared(EXTRAS["docs"])) == {}


def test_tested_versions_are_within_the_declared_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    for text in [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name not in {PROJECT["name"], *NOT_INSTALLED.values()}:
            assert requirement.specifier.contains(pinned[name]), text
