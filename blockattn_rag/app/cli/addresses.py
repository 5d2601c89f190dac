"""Which store a command means: an address, a store's folder, or a database's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag import store as kv_store
from blockattn_rag.app.rag.database import MANIFEST, Manifest

StoreArgument = Annotated[
    str,
    typer.Argument(
        help="A KV store: its folder, an address such as s3://bucket/kv, or a database folder "
        "made by `ingest`."
    ),
]
FolderArgument = Annotated[
    str, typer.Argument(help="A KV store's folder, or a database folder made by `ingest`.")
]


def whole_store(spec: str | None) -> str | None:
    """What an option names a store by: an address as it is, a folder as a whole path.

    Raises:
        BadParameter: it is no address.
    """
    from blockattn_rag.store.urls import scheme_of

    try:
        return spec if not spec or scheme_of(spec) else str(Path(spec).resolve())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def whole_recipe(name: str | None) -> str | None:
    """A recipe's folder as an absolute path; other names unchanged."""
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def open_maintained(store: str) -> kv_store.MaintainedStore:
    """The store that an address, a folder that exists, or a database's folder means.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is a cache, in which there is nothing to look after, or no address.
    """
    from blockattn_rag.store.specs import folder_of, open_spec  # they load torch
    from blockattn_rag.store.urls import scheme_of

    scheme = scheme_of(store)
    if not scheme:
        manifest = Manifest.read(Path(store))
        if manifest is not None and manifest.store is not None:
            return open_maintained(manifest.store)
        return kv_store.DirectoryStore(store_folder(Path(store)), create=False)
    if scheme == "file":
        return kv_store.DirectoryStore(store_folder(folder_of(store)), create=False)
    if scheme in ("memory", "redis", "rediss"):
        raise ValueError(
            f"a store at {scheme}: is a cache: it forgets by itself, and there is nothing to look "
            "after; give the folder or the address of the store behind it"
        )
    opened = open_spec(store)
    if not isinstance(opened, kv_store.MaintainedStore):
        raise ValueError(f"{store} cannot be listed and swept")
    return opened


def open_folder(store: str) -> kv_store.DirectoryStore:
    """As ``open_maintained``, of a store that must be a folder."""
    opened = open_maintained(store)
    if not isinstance(opened, kv_store.DirectoryStore):
        raise ValueError(
            f"found {opened!r}, expected a folder: only there it is known what was used last. "
            "Delete what is old with `blockattn-rag store gc --ttl 30d`"
        )
    return opened


def store_folder(path: Path) -> Path:
    """The folder of a store's entries: of a database folder, the one within it."""
    folder = path / "kv" if (path / MANIFEST).is_file() else path
    if not folder.is_dir():
        raise FileNotFoundError(f"no such KV store: {folder}")
    return folder
