"""Options shared by several commands, and validation of their values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from blockattn_rag import store as kv_store
from blockattn_rag.app.rag.database import Manifest

DatabaseOption = Annotated[Path, typer.Option("--db", help="Database folder, created by `ingest`.")]
DTYPE_HELP = (
    "Dtype of the weights: float32, bfloat16, float16 or, except with vLLM, int8 or nf4 (4 bits) "
    "to save memory."
)
DtypeOption = Annotated[str, typer.Option(help=f"{DTYPE_HELP} Default: auto.")]
KV_DTYPE_HELP = (
    "Dtype of the stored keys and values: model (the model's dtype) or int8 (half the size of a "
    "16-bit dtype, with nearly the same answers)."
)
KVDtypeName = Literal["model", "int8"]  # Importing kv.KVDtype would load torch.
KVDtypeOption = Annotated[KVDtypeName, typer.Option(help=KV_DTYPE_HELP)]
MaxNewTokensOption = Annotated[
    int, typer.Option(min=1, help="Maximum length of an answer in tokens.")
]
MODEL_HELP = "Model name or folder. [bold]bundled[/bold] is the test model inside this package."
RecipeOption = Annotated[
    str | None,
    typer.Option(
        help="Recipe for block mode: auto, settings such as none, fast or head+recompute:0.1, or a "
        "recipe folder. Default: the database's, or auto."
    ),
]
StoreArgument = Annotated[
    str,
    typer.Argument(
        help="KV store: its folder, an address such as s3://bucket/kv, or a database folder."
    ),
]
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds per time unit."""


def absolute_store(address: str | None) -> str | None:
    from blockattn_rag.store.urls import scheme_of

    try:
        return address if not address or scheme_of(address) else str(Path(address).resolve())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def lasting_store(address: str | None) -> str | None:
    """Return the result of ``absolute_store``, or raise BadParameter for in-memory stores."""
    from blockattn_rag.store.urls import lasts

    store = absolute_store(address)
    if store and not lasts(store):
        raise typer.BadParameter(
            "An in-memory store is lost when this command ends; pass a folder or an address such "
            "as s3://bucket/kv"
        )
    return store


def absolute_recipe(name: str | None) -> str | None:
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def seconds_of(text: str, option: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if match is None:
        raise typer.BadParameter(
            f"Expected a time such as 90s, 30m, 24h or 7d, found {text!r}", param_hint=option
        )
    return float(match[1]) * _UNITS[match[2]]


def open_maintained(store: str) -> kv_store.MaintainedStore:
    """Open a store, given its address, its folder, or the folder of a database."""
    from blockattn_rag.store.urls import folder_of, scheme_of

    scheme = scheme_of(store)
    if scheme in ("", "file"):
        folder = folder_of(store) if scheme else Path(store)
        manifest = Manifest.read(folder)
        if manifest is not None and manifest.store is not None:
            return open_maintained(manifest.store)
        folder = folder / "kv" if manifest is not None else folder
        if not folder.is_dir():
            raise FileNotFoundError(f"No such KV store: {folder}")
        return kv_store.DirectoryStore(folder, create=False)
    if scheme in ("memory", "redis", "rediss"):
        raise ValueError(
            f"Found a {scheme}: store, a cache that evicts entries on its own; pass the folder or "
            "address of the store behind it"
        )
    opened = kv_store.open_store(store)
    if not isinstance(opened, kv_store.MaintainedStore):
        raise ValueError(f"{store} does not support maintenance: pass a folder or a bucket")
    return opened
