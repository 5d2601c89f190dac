"""Threads that the end of the process waits for, after it has asked them to end."""

from __future__ import annotations

import subprocess
import sys
import threading

from blockattn_rag.engine.threads import start_thread
from tests.holding import LONGEST_S


def test_work_is_done_beside_the_caller() -> None:
    done = threading.Event()
    start_thread(done.set, "blockattn-test", lambda: None)
    assert done.wait(LONGEST_S)


def test_a_process_that_ends_stops_its_threads_and_waits_for_them() -> None:
    script = """
import atexit, threading
left, nobody_waited = threading.Event(), threading.Event()
atexit.register(nobody_waited.set)  # runs last: after what the package registers when imported
from blockattn_rag.engine.threads import start_thread
def work():
    left.wait(60)
    print("too late" if nobody_waited.wait(1) else "ended", flush=True)
start_thread(work, "blockattn-test", left.set)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=4 * LONGEST_S, check=True,
    )  # fmt: skip
    assert ended.stdout == "ended\n"
