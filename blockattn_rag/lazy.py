"""Names of the framework packages, imported when they are first used."""

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
        raise ImportError(
            f"{package}.{name} needs {error.name}, which is not installed: "
            f'pip install "blockattn-rag[{extra}]"'
        ) from error
    return getattr(module, name)
