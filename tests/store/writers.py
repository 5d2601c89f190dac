"""What the writer processes of the crash tests do. Started by forkserver, so torch loads once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

import torch

from blockattn_rag.store import DirectoryStore, directory
from blockattn_rag.store.format import encode
from tests.store.kvs import key_of, make_kv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from blockattn_rag.kv import BlockKV

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.store.writers"])


def passage(number: int, filled_with: int | None = None) -> BlockKV:
    """184 KB; with ``filled_with``, every key and value is this number."""
    kv = make_kv(f"passage {number}", layers=6, tokens=60, head_dim=32)
    if filled_with is None:
        return kv
    return replace(
        kv,
        keys=tuple(torch.full_like(k, filled_with) for k in kv.keys),
        values=tuple(torch.full_like(v, filled_with) for v in kv.values),
    )


def write_until_killed(path: Path, started: Connection) -> None:
    """Put ten passages over and over; tells when the first is stored."""
    torch.set_num_threads(1)
    store = DirectoryStore(path)
    kvs = [passage(number) for number in range(10)]
    store.put(key_of(kvs[0]), kvs[0])
    started.send(None)
    while True:
        for kv in kvs:
            store.put(key_of(kv), kv)


def write_times(path: Path, filled_with: int, times: int) -> None:
    """Put five passages ``times`` times, each filled with this number."""
    torch.set_num_threads(1)
    store = DirectoryStore(path, fsync=False)
    kvs = [passage(number, filled_with) for number in range(5)]
    for _ in range(times):
        for kv in kvs:
            store.put(key_of(kv), kv)


def die_at(step: str, path: Path, kv: BlockKV) -> None:
    """Put ``kv`` and die, as by ``kill -9``, at this step of writing (one of ``STEPS``)."""
    store = DirectoryStore(path)
    target, name, fatal = STEPS[step]
    with mock.patch.object(target, name, fatal):
        store.put(key_of(kv), kv)


def _die(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _half(kv: BlockKV) -> Iterator[memoryview]:
    buffers = encode(kv)
    yield from buffers[: len(buffers) // 2]
    _die()


def _replace(old: Path, new: Path) -> None:
    os.rename(old, new)
    _die()


STEPS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "half written": (directory, "encode", _half),
    "written": (os, "fsync", _die),
    "flushed": (os, "replace", _die),
    "renamed": (os, "replace", _replace),
}
