"""Writers that are killed, and concurrent writers of the same keys."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import torch

from blockattn_rag.store import DirectoryStore, gc, verify
from tests.processes import PROCESSES
from tests.store.kvs import same
from tests.store.writers import STEPS, die_at, kill_writers, passage, write_times

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
    found = store.get(old.key)
    assert found is not None
    assert same(found, new if step == "renamed" else old)
    report = verify(store)
    assert (report.ok, report.leftovers.count) == (1, 0 if step == "renamed" else 1)
    assert gc(store, {old.handle}, grace_s=0).leftovers == report.leftovers
    assert not list(store.leftovers())


def test_concurrent_writers_of_the_same_keys_leave_complete_entries(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    writers = [
        PROCESSES.Process(target=write_times, args=(tmp_path, filled_with, 10))
        for filled_with in (1, 2)
    ]
    for writer in writers:
        writer.start()
    keys = [passage(number).key for number in range(5)]
    reads = 0
    while any(writer.is_alive() for writer in writers) or not reads:
        for key in keys:
            if (kv := store.get(key)) is not None:
                reads += 1
                seen = torch.cat([t.flatten() for t in (*kv.keys, *kv.values)])
                assert seen.min() == seen.max()
    assert [writer.exitcode for writer in writers] == [0, 0]
    report = verify(store)
    assert (report.ok, report.damaged.count, report.leftovers.count) == (5, 0, 0)
