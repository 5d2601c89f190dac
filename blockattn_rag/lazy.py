"""Names of packages, imported when they are first used; the extra that installs what is missing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(
    package: str,
    homes: Mapping[str, str],
    *,
    extra: str = "",
    extra_packages: Collection[str] = (),
) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``, for names from the modules inside that ``homes`` gives.

    It raises AttributeError for other names, and ImportError, which names the extra, if one of
    ``extra_packages`` is not installed.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{package}.{homes[name]}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in extra_packages:
                raise
            needed = missing_extra(error.name or "", extra)
            raise ImportError(f"{package}.{name} needs {needed}") from error
        return getattr(module, name)

    return find


def missing_extra(package: str, extra: str) -> str:
    """The end of a message of what needs ``package``, which the extra of this name installs."""
    return (
        f"{package}, which is not installed; run `pip install -c constraints.txt -e "
        f'".[{extra}]"` in the folder that blockattn-rag was installed from'
    )
