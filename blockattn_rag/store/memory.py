"""In-memory store with LRU eviction."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import KVStore, Sidecar, StoreStats
from blockattn_rag.store.checks import check_entry
from blockattn_rag.store.eviction import Refusals, check_max_bytes


class MemorySidecar(Sidecar):
    """Sidecar files in the memory of this process."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def names(self, folder: str) -> list[str]:
        start = f"{folder}/"
        return [path.removeprefix(start) for path in [*self._files] if path.startswith(start)]

    def read(self, paths: Sequence[str]) -> list[bytes | None]:
        return [self._files.get(path) for path in paths]

    def write(self, path: str, content: bytes) -> None:
        self._files[path] = content

    def delete(self, path: str) -> None:
        self._files.pop(path, None)


class MemoryStore(KVStore):
    """In-memory store that evicts the least recently used blocks.

    A block larger than ``max_bytes`` is not stored, but counted in ``stats().refused``; the first
    one is also logged. Without ``on_host``, blocks are not copied. A block whose tensors are views
    then keeps the complete underlying tensors in memory, but only the views count toward the limit.

    Args:
        max_bytes: Size limit of all keys, values and scales in bytes (``BlockKV.nbytes``).
        on_host: Whether to keep copies in host memory, page-locked if CUDA is available, for fast
            transfers to a device. Use it for a memory tier in front of a slower store.
    """

    def __init__(self, max_bytes: int, *, on_host: bool = False) -> None:
        check_max_bytes(max_bytes)
        self.max_bytes = max_bytes
        self.on_host = on_host
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, BlockKV] = OrderedDict()
        self._total_bytes = 0
        self._evictions = 0
        self._refusals = Refusals()
        self._sidecar = MemorySidecar()

    def __repr__(self) -> str:
        return f"MemoryStore(max_bytes={self.max_bytes})"

    @property
    def sidecar(self) -> MemorySidecar:
        return self._sidecar

    def get(self, key: str) -> BlockKV | None:
        with self._lock:
            kv = self._entries.get(key)
            if kv is not None:
                self._entries.move_to_end(key)
            return kv

    def put(self, key: str, kv: BlockKV) -> None:
        check_entry(key, kv)
        nbytes = kv.nbytes
        if self.on_host and nbytes <= self.max_bytes:
            kv = host_copy(kv)
        with self._lock:
            self._remove(key)
            if nbytes > self.max_bytes:
                self._refusals.add(self, nbytes)
                return
            while self._total_bytes + nbytes > self.max_bytes:
                self._remove(next(iter(self._entries)))
                self._evictions += 1
            self._entries[key] = kv
            self._total_bytes += nbytes

    def touch(self, key: str) -> bool:
        return self.get(key) is not None

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._entries

    def delete(self, key: str) -> bool:
        with self._lock:
            return self._remove(key)

    def keys(self) -> Iterator[str]:
        """Iterate over a snapshot of the keys, least recently used first."""
        with self._lock:
            return iter(list(self._entries))

    def stats(self) -> StoreStats:
        with self._lock:
            refused = self._refusals.count
            return StoreStats(len(self._entries), self._total_bytes, self._evictions, refused)

    def _remove(self, key: str) -> bool:
        kv = self._entries.pop(key, None)
        if kv is not None:
            self._total_bytes -= kv.nbytes
        return kv is not None


def host_copy(kv: BlockKV) -> BlockKV:
    """Copy a block to host memory, page-locked if CUDA is available."""
    copy = kv.copy_to(torch.device("cpu"))
    if not torch.cuda.is_available():
        return copy
    layers = [[t.pin_memory() for t in copy.tensors(layer)] for layer in range(copy.num_layers)]
    return copy.with_tensors(layers)
