"""Writers that are killed."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from blockattn_rag.store import DirectoryStore, gc, verify
from tests.processes import PROCESSES
from tests.store.kvs import same
from tests.store.writers import STEPS, die_at, kill_writers, passage

if TYPE_CHECKING:
    from pathlib import Path


def test_killed_writers_leave_no_damaged_entry(tmp_path: Path) -> None:
    killer = PROCESSES.Process(target=kill_writers, args=(tmp_path, 20))
    killer.start()
    killer.join()
    assert killer.exitcode == 0
    store = DirectoryStore(tmp_path)
    for number in range(10):  # the next ingestion completes the store
        kv = passage(number)
        store.put(kv.key, kv)
    report = verify(store)
    assert (report.ok, report.damaged.count) == (10, 0)


@pytest.mark.parametrize("step", STEPS)
def test_killed_writer_leaves_old_or_new_entry(tmp_path: Path, step: str) -> None:
    store, old, new = DirectoryStore(tmp_path), passage(0, 1), passage(0, 2)
    store.put(old.key, old)
    writer = PROCESSES.Process(target=die_at, args=(step, tmp_path, new))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert same(store.get(old.key), new if step == "renamed" else old)
    report = verify(store)
    assert (report.ok, report.leftovers.count) == (1, 0 if step == "renamed" else 1)
    assert gc(store, {old.handle}, grace_s=0).leftovers == report.leftovers
    assert not list(store.leftovers())
