"""Opening a store by its path or address."""

from __future__ import annotations

import logging
from pathlib import Path

from blockattn_rag.store import urls
from blockattn_rag.store.base import KVStore

logger = logging.getLogger("blockattn_rag")

DEFAULT_MEMORY_BYTES = 1 << 30
"""Default size of an in-memory store: 1 GiB."""

_KNOWN = (
    "a path, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///path, "
    "redis://host:port/database, memory: or memory:2GiB"
)


def open_store(spec: KVStore | str | Path | None) -> KVStore:
    """Open the store at a path or address.

    Args:
        spec: A store, which is returned unchanged; None for a new 1 GiB ``MemoryStore``; or

            - a path or ``file:///path``: a ``DirectoryStore`` without a size limit (for a limit,
              pass ``DirectoryStore(path, max_bytes=...)``)
            - ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``: an
              ``ObjectStore`` (extra ``s3``)
            - ``redis://host:port/database``, or ``rediss://``: a ``RedisStore`` (extra ``redis``),
              a cache to use in a ``TieredStore``
            - ``memory:`` or ``memory:2GiB``: a new ``MemoryStore``, by default with 1 GiB

    Raises:
        ImportError: The store needs an extra that is not installed.
        StoreError: The path cannot be used as a store.
        TypeError: ``spec`` has another type.
        ValueError: The address is invalid, has an unknown scheme, or contains credentials.
    """
    if isinstance(spec, KVStore):
        return spec
    if spec is not None and not isinstance(spec, (str, Path)):
        raise TypeError(
            f"store must be a KVStore, a path, an address or None, found {type(spec).__name__}"
        )
    opened = open_spec("memory:" if spec is None else spec)
    if spec is not None and urls.is_cache(spec):
        logger.warning(
            "%r is a cache: blocks that it evicts must be encoded again. Add a permanent store "
            "behind it, as in TieredStore(%r, 's3://bucket/kv'), or use a folder instead",
            opened,
            str(spec),
        )
    return opened


def open_spec(spec: str | Path, *, on_host: bool = False) -> KVStore:
    """Open the store at a path or address, without the checks and the warning of ``open_store``."""
    text = str(spec)
    scheme = urls.scheme_of(text)
    # Imported lazily, so that opening a store does not load dependencies of other stores.
    if scheme == "memory":
        from blockattn_rag.store.memory import MemoryStore

        size = text.removeprefix("memory:").strip("/ ")
        return MemoryStore(urls.bytes_of(size) if size else DEFAULT_MEMORY_BYTES, on_host=on_host)
    if scheme in ("", "file"):
        from blockattn_rag.store.directory import DirectoryStore

        return DirectoryStore(urls.folder_of(text) if scheme else spec)
    if scheme in urls.OBJECT_SCHEMES:
        from blockattn_rag.store.objects import ObjectStore

        return ObjectStore(text)
    if scheme in urls.REDIS_SCHEMES:
        from blockattn_rag.store.redis import RedisStore

        return RedisStore(text)
    raise ValueError(f"Unknown store address {scheme}://, expected {_KNOWN}")
