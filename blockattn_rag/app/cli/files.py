"""Files that options name, checked before anything is measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import typer

from blockattn_rag.lazy import missing_extra


def writable(file: Path | None) -> Path | None:
    """A file that can be written, where its folder tells."""
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"no such folder: {file.absolute().parent}")
    return file


def drawable(file: Path | None) -> Path | None:
    """A file that a plot can be written to."""
    if file is not None and file.suffix not in (".svg", ".png", ".pdf"):
        raise typer.BadParameter(f"expected a name that ends in .svg, .png or .pdf, found {file}")
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(f"plots need {missing_extra('matplotlib', 'train')}")
    return writable(file)
