"""Names of packages, imported when they are first used; the extra that installs what is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(
    package: str,
    homes: Mapping[str, str],
    *,
    extra: str = "",
    extra_packages: Collection[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package whose modules are imported when needed.

    Args:
        package: its name.
        homes: module inside the package, and the names in it, with blanks between.
        extra: installs ``extra_packages``; said by the ImportError where one of them is missing.
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
    """The end of a message of what needs ``package``, which the extra of this name installs."""
    return (
        f"{package}, which is not installed; run `pip install -c constraints.txt -e "
        f'".[{extra}]"` in the folder that blockattn-rag was installed from'
    )
