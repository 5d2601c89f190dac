"""Packages that only extras install: imported when they are first used, named when missing."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping


def import_name(
    package: str,
    name: str,
    homes: Mapping[str, str],
    *,
    extra: str,
    extra_packages: Collection[str],
) -> object:
    """What ``package`` calls ``name``, from the module of the package that ``homes`` gives.

    Raises:
        AttributeError: the package has no such name.
        ImportError: one of ``extra_packages`` is not installed; the message names the extra.
    """
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


def missing_extra(package: str, extra: str) -> str:
    """The end of a message of what needs ``package``, which the extra of this name installs."""
    return (
        f"{package}, which is not installed; run `pip install -c constraints.txt -e "
        f'".[{extra}]"` in the folder that blockattn-rag was installed from'
    )
