"""The store that a command means: an address, a store's folder, or a database's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag import store as kv_store
from blockattn_rag.app.rag.database import MANIFEST, Manifest

StoreArgument = Annotated[
    str,
    typer.Argument(
        help="A KV store: its folder, an address such as s3://bucket/kv, or a database folder."
    ),
]
FolderArgument = Annotated[str, typer.Argument(help="A KV store's folder, or a database folder.")]


def open_maintained(store: str) -> kv_store.MaintainedStore:
    """The store behind an address, a store's folder, or a database's folder.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It is a cache, which needs no maintenance, or the address is invalid.
    """
    from blockattn_rag.store.specs import folder_of, open_spec  # they load torch
    from blockattn_rag.store.urls import scheme_of

    scheme = scheme_of(store)
    if not scheme:
        manifest = Manifest.read(Path(store))
        if manifest is not None and manifest.store is not None:
            return open_maintained(manifest.store)
        return kv_store.DirectoryStore(_store_folder(Path(store)), create=False)
    if scheme == "file":
        return kv_store.DirectoryStore(_store_folder(folder_of(store)), create=False)
    if scheme in ("memory", "redis", "rediss"):
        raise ValueError(
            f"a store at {scheme}: is a cache, which evicts entries itself; give the folder or the "
            "address of the store behind it"
        )
    opened = open_spec(store)
    if not isinstance(opened, kv_store.MaintainedStore):
        raise ValueError(f"{store} does not support maintenance")
    return opened


def open_folder(store: str) -> kv_store.DirectoryStore:
    """As ``open_maintained``, for a store in a folder."""
    opened = open_maintained(store)
    if not isinstance(opened, kv_store.DirectoryStore):
        raise ValueError(
            f"found {opened!r}, expected a folder: other stores do not record when an entry was "
            "used last. Delete old entries with `blockattn-rag store gc --ttl 30d`"
        )
    return opened


def _store_folder(path: Path) -> Path:
    folder = path / "kv" if (path / MANIFEST).is_file() else path
    if not folder.is_dir():
        raise FileNotFoundError(f"no such KV store: {folder}")
    return folder
