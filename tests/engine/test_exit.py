"""The model's thread at process exit."""

from __future__ import annotations

import subprocess
import sys

from tests.holding import LONGEST_S


def test_exit_cancels_pending_work_and_waits_for_threads() -> None:
    script = """
import atexit, threading
begun, nobody_waited = threading.Event(), threading.Event()
atexit.register(nobody_waited.set)  # runs last: after what the package registers when imported
from blockattn_rag.engine.pending import Job
from blockattn_rag.engine.scheduler import scheduler_of
from blockattn_rag.model.exclusion import ModelLock
def work():
    begun.set()
    while not job.left:
        nobody_waited.wait(0.01)
    print("too late" if nobody_waited.wait(1) else "ended", flush=True)
job, lock = Job(work), ModelLock()
scheduler_of(lock).submit(job)
begun.wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=4 * LONGEST_S, check=True,
    )  # fmt: skip
    assert ended.stdout == "ended\n"
