"""Functions that run in the writer processes of the crash tests."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import torch

from blockattn_rag.files import replacing
from blockattn_rag.store import DirectoryStore, directory, verify
from tests.store.kvs import make_kv, same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from blockattn_rag.kv.block_kv import BlockKV


def passage(number: int, filled_with: int | None = None) -> BlockKV:
    """Return a passage of 184 KB. ``filled_with``: Value of every key and value."""
    kv = make_kv(f"passage {number}", layers=6, tokens=60, head_dim=32)
    if filled_with is None:
        return kv
    return replace(
        kv,
        keys=tuple(torch.full_like(k, filled_with) for k in kv.keys),
        values=tuple(torch.full_like(v, filled_with) for v in kv.values),
    )


def kill_writers(path: Path, times: int) -> None:
    """Fork a writer ``times`` times, kill it at a random time after it has started, and check that
    no entry is damaged."""
    torch.set_num_threads(1)
    store, choose = DirectoryStore(path), random.Random(0)
    kvs = [passage(number) for number in range(10)]
    for _ in range(times):
        begun, beginning = os.pipe()
        writer = os.fork()
        if writer == 0:
            _write_until_killed(store, kvs, beginning)
        os.close(beginning)
        assert os.read(begun, 1) == b"!"
        os.close(begun)
        time.sleep(choose.uniform(0, 0.05))
        os.kill(writer, signal.SIGKILL)
        _, status = os.waitpid(writer, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        assert not verify(store).damaged


def _write_until_killed(store: DirectoryStore, kvs: list[BlockKV], beginning: int) -> NoReturn:
    try:
        os.write(beginning, b"!")
        while True:
            for kv in kvs:
                store.put(kv.key, kv)
    finally:
        os._exit(1)  # errors must not continue in the parent's code


def fill_bounded(path: Path, max_bytes: int, seed: int) -> None:
    """Put, read and touch small passages in a bounded store, and check what is read."""
    torch.set_num_threads(1)
    store, choose = DirectoryStore(path, fsync=False, max_bytes=max_bytes), random.Random(seed)
    kvs = [make_kv(f"passage {number}") for number in range(12)]
    for _ in range(150):
        kv = choose.choice(kvs)
        store.put(kv.key, kv)
        kv = choose.choice(kvs)
        if store.touch(kv.key):
            found = store.get(kv.key)
            assert found is None or same(found, kv)


def die_at(step: str, path: Path, kv: BlockKV) -> None:
    """Put ``kv`` and kill the process at a step of the write (one of ``STEPS``)."""
    store = DirectoryStore(path)
    target, name, fatal = STEPS[step]
    with mock.patch.object(target, name, fatal):
        store.put(kv.key, kv)


def _die(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _half(path: Path, **options: Any) -> Iterator[SimpleNamespace]:
    with replacing(path, **options) as file:

        def write(content: bytes) -> None:
            file.write(content[: len(content) // 2])
            file.flush()
            _die()

        yield SimpleNamespace(write=write)


def _replace(old: Path, new: Path) -> None:
    os.rename(old, new)
    _die()


STEPS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "half written": (directory, "replacing", _half),
    "written": (os, "fsync", _die),
    "flushed": (os, "replace", _die),
    "renamed": (os, "replace", _replace),
}
