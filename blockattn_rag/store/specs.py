"""What a store is named by: a path, or an address such as ``s3://bucket/kv``."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blockattn_rag.store.base import KVStore
from blockattn_rag.store.directory import DirectoryStore
from blockattn_rag.store.memory import MemoryStore
from blockattn_rag.store.urls import check_no_credentials, scheme_of

_OBJECT_SCHEMES = ("s3", "gs", "az")
_REDIS_SCHEMES = ("redis", "rediss")
_KNOWN = (
    "a path, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///path, "
    "redis://host:port/database, memory: or memory:2GiB"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)


def open_spec(spec: str | Path, *, on_host: bool = False) -> KVStore:
    """The store that a path or an address means.

    Args:
        on_host: as ``MemoryStore``, for ``memory:``.

    Raises:
        ImportError: it needs a package that is not installed.
        StoreError: a path cannot be used as a store.
        ValueError: it is no address of a store, or holds credentials.
    """
    text = str(spec)
    scheme = scheme_of(text)
    if not scheme:
        return DirectoryStore(spec)
    if scheme == "memory":
        from blockattn_rag.store import DEFAULT_MEMORY_BYTES

        size = text.removeprefix("memory:").strip("/ ")
        return MemoryStore(bytes_of(size) if size else DEFAULT_MEMORY_BYTES, on_host=on_host)
    if scheme == "file":
        return DirectoryStore(folder_of(text))
    # Imported where they are used: they bring threads, and need extras.
    if scheme in _OBJECT_SCHEMES:
        from blockattn_rag.store.objects import ObjectStore

        return ObjectStore(text)
    if scheme in _REDIS_SCHEMES:
        from blockattn_rag.store.redis import RedisStore

        return RedisStore(text)
    raise ValueError(f"found {scheme}:// for a store, expected {_KNOWN}")


def is_cache(spec: str | Path) -> bool:
    """Whether an address means a server that forgets its entries."""
    return scheme_of(str(spec)) in _REDIS_SCHEMES


def bytes_of(size: str) -> int:
    """How many bytes a size such as ``2GiB`` means.

    Raises:
        ValueError: it is none.
    """
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(
            f"expected a size such as 2GiB, or memory:2GiB for a store, found {size!r}"
        )
    power = " kmgt".index((match[2] or " ").lower())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def folder_of(url: str) -> Path:
    """The folder that a ``file:`` address means."""
    check_no_credentials(url, "the folder's own permissions")
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"expected file:/// and a whole path on this machine, found {url!r}")
    return Path(unquote(parts.path))
