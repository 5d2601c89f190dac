"""Threads that the end of the process waits for, after it has asked them to end."""

from __future__ import annotations

import subprocess
import sys
import threading

from blockattn_rag.threads import start_thread


def test_work_is_done_beside_the_caller() -> None:
    done = threading.Event()
    start_thread(done.set, "blockattn-test", lambda: None)
    assert done.wait(10)


def test_a_process_that_ends_stops_its_threads_and_waits_for_them() -> None:
    script = """
import threading, time
from blockattn_rag.threads import start_thread
left = threading.Event()
def work():
    left.wait(30)
    time.sleep(0.2)
    print("ended", flush=True)
start_thread(work, "blockattn-test", left.set)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "ended\n"
