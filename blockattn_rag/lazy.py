"""Lazy imports of package members, and error messages that name the extra to install."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, *, extra: str = "", extra_packages: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its names on first use.

    These are the names that the package's ``__init__.py`` imports under ``if TYPE_CHECKING``.

    Args:
        extra: Extra that installs ``extra_packages``. If one of these packages is missing, the
            ImportError names the extra.
    """

    def find(name: str) -> Any:
        home_of = _imported_for_types(str(sys.modules[package].__file__))
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(home_of[name])
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in extra_packages:
                raise
            needed = missing_extra(error.name or "", extra)
            raise ImportError(f"{package}.{name} needs {needed}") from error
        return getattr(module, name)

    return find, lambda: list(sys.modules[package].__all__)


@functools.cache
def _imported_for_types(file: str) -> Mapping[str, str]:
    """Names imported in a module's top-level ``if``, mapped to the modules that define them."""
    tree = ast.parse(Path(file).read_text("utf-8"))
    return {
        alias.name: str(node.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def missing_extra(package: str, extra: str) -> str:
    """End of an error message: the missing package, and the command that installs its extra."""
    command = f'`pip install "blockattn-rag[{extra}]"`'
    if _from_a_folder():
        command = (
            f'`pip install -c constraints.txt -e ".[{extra}]"` in the folder that blockattn-rag '
            "was installed from"
        )
    return f"{package}, which is not installed; run {command}"


def _from_a_folder() -> bool:
    """Whether this package runs from a repository, or was installed from a folder, file or URL."""
    try:
        # pip writes this file unless it found the package on an index (PEP 610).
        return distribution("blockattn-rag").read_text("direct_url.json") is not None
    except PackageNotFoundError:
        return True
