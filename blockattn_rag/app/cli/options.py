"""Options that several commands share, and the checks of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

DatabaseOption = Annotated[Path, typer.Option("--db", help="Database folder, made by `ingest`.")]
DtypeOption = Annotated[
    str, typer.Option(help="Type of the weights: auto, float32, bfloat16 or float16.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
KV_DTYPE_HELP = (
    "Type that keys and values are stored in: model (the model's own) or int8 (half the bytes of "
    "16 bits, with nearly the same answers)."
)
KVDtypeName = Literal["model", "int8"]  # kv.KVDtype would load torch
KVDtypeOption = Annotated[KVDtypeName, typer.Option(help=KV_DTYPE_HELP)]
MODEL_HELP = "Model name or folder. [bold]bundled[/bold] is the test model inside this package."
RecipeOption = Annotated[
    str | None,
    typer.Option(
        help="Recipe of block mode: auto, none, a sink such as head:4, or a recipe folder. "
        "Default: the database's, or auto."
    ),
]


def absolute_store(address: str | None) -> str | None:
    """A store's folder as an absolute path; other addresses unchanged.

    Raises:
        BadParameter: The address is invalid.
    """
    from blockattn_rag.store.urls import scheme_of

    try:
        return address if not address or scheme_of(address) else str(Path(address).resolve())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def absolute_recipe(name: str | None) -> str | None:
    """A recipe's folder as an absolute path; other names unchanged."""
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def file_in_folder(file: Path | None) -> Path | None:
    """A file whose folder exists.

    Raises:
        BadParameter: There is no such folder.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"no such folder: {file.absolute().parent}")
    return file
