"""Lazy imports of package members, and error messages that name the extra to install."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any


def lazy_names(
    package: str,
    homes: Mapping[str, str],
    *,
    extra: str = "",
    extra_packages: Collection[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its modules lazily.

    Args:
        homes: Module name in the package, mapped to the public names that it defines, separated by
            spaces.
        extra: Extra that installs ``extra_packages``. If one of these packages is missing, the
            ImportError names the extra.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{package}.{home_of[name]}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in extra_packages:
                raise
            needed = missing_extra(error.name or "", extra)
            raise ImportError(f"{package}.{name} needs {needed}") from error
        return getattr(module, name)

    return find, lambda: list(sys.modules[package].__all__)


def missing_extra(package: str, extra: str) -> str:
    """End of an error message: the missing package, and how to install the extra it belongs to."""
    command = f'`pip install "blockattn-rag[{extra}]"`'
    if _from_a_folder():
        command = (
            f'`pip install -c constraints.txt -e ".[{extra}]"` in the folder that blockattn-rag '
            "was installed from"
        )
    return f"{package}, which is not installed; run {command}"


def _from_a_folder() -> bool:
    """Whether this package runs from a repository or was installed from a file, by no index."""
    try:
        # pip writes this file for everything that comes from a folder or an address (PEP 610).
        return distribution("blockattn-rag").read_text("direct_url.json") is not None
    except PackageNotFoundError:
        return True
