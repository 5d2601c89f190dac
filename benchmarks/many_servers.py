"""Ingest on two servers, kill the worker and a server, and count what is lost or repeated.

    python benchmarks/many_servers.py > benchmarks/results/many-servers.json

Two servers of the bundled model share a folder store, whose writes are counted. Each is a process
with the stand-in of the tests, which reads requests with the server's own code and answers with
this package's engine instead of vLLM. A worker process encodes short passages on both. At a
quarter of them, the worker is killed and started again; at half, a server is killed; at three
quarters, the worker is killed and the run is resumed with a new second server. A last run repeats
everything. Then both servers answer the same questions. Exit status 1 if a passage is lost or
stored twice, if the last run sends a passage although the journal has it, or if a server misses a
passage.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from blockattn_rag import BlockModel, DirectoryStore
from blockattn_rag.app.demo.corpus import bundled_corpus
from blockattn_rag.server import ServerClient, ServerPool
from blockattn_rag.server.protocol import ENCODE
from tests.fake_server import FakeServer

QUESTIONS, PER_QUESTION = 8, 4
FORK = multiprocessing.get_context("fork")
_MOVED_TO = 0x80
"""``IN_MOVED_TO`` of inotify."""


class Writes:
    """Counts how often each entry of a folder store was written (Linux: inotify).

    A thread reads the events: an entry gets its name when it is complete.
    """

    def __init__(self, store: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.inotify_init1(os.O_CLOEXEC)
        for number in range(256):
            folder = store / "objects" / f"{number:02x}"
            folder.mkdir(parents=True)
            if libc.inotify_add_watch(self._events, os.fsencode(folder), _MOVED_TO) < 0:
                raise OSError(ctypes.get_errno(), f"Cannot watch {folder}")
        self.of: Counter[str] = Counter()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while data := os.read(self._events, 1 << 16):
            at = 0
            while at < len(data):
                (size,) = struct.unpack_from("I", data, at + 12)
                name = data[at + 16 : at + 16 + size].rstrip(b"\0").decode()
                if name.endswith(".safetensors"):
                    self.of[name] += 1
                at += 16 + size


class CountingServer(FakeServer):
    """Stand-in of a server that counts the requests that it has answered."""

    answered = 0

    def encode(self, fields: Any) -> dict[str, Any]:
        try:
            return super().encode(fields)
        finally:
            self.answered += 1


def serve(store: Path, pipe: Connection) -> None:
    """Process of a server: sends its address, then the numbers of its requests when asked."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- answers to killed clients fail
    model = BlockModel.from_pretrained("bundled", device="cpu")
    server = CountingServer(model, DirectoryStore(store))
    with server.listening():
        pipe.send(server.url)
        while pipe.recv():
            pipe.send((len(server.bodies(ENCODE)), server.answered))


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self, store: Path) -> None:
        self._pipe, end = FORK.Pipe()
        self._process = FORK.Process(target=serve, args=(store, end), daemon=True)
        self._process.start()
        self.url: str = self._pipe.recv()

    def requests(self) -> int:
        """Number of encoding requests, when all are answered.

        vLLM's server cancels requests of a client that died. The stand-in completes them.
        """
        while True:
            self._pipe.send(True)
            received, answered = self._pipe.recv()
            if received == answered:
                return int(received)
            time.sleep(0.1)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def work(urls: Sequence[str], journal: Path, passages: Sequence[str]) -> None:
    """Process of the worker."""
    ServerPool([ServerClient(url) for url in urls], journal).encode(passages)


def wait_for(writes: Writes, stored: int, worker: multiprocessing.process.BaseProcess) -> int:
    """Wait until so many entries are stored. Returns the number of entries."""
    while len(writes.of) < stored:
        if not worker.is_alive():
            raise RuntimeError(f"The worker ended before {stored} passages were stored")
        time.sleep(0.01)
    return len(writes.of)


def kill(worker: multiprocessing.process.BaseProcess, servers: Sequence[ServerProcess]) -> None:
    """Kill the worker, and wait until the servers are idle."""
    worker.kill()
    worker.join()
    for server in servers:
        server.requests()


def short_passages(count: int) -> list[str]:
    """Distinct passages of one sentence."""
    corpus = bundled_corpus()
    return [
        f"Note {number}. {corpus[number % len(corpus)].text.split('. ')[0]}."
        for number in range(count)
    ]


def records_of(journal: Path) -> Iterator[dict[str, Any]]:
    """The journal's complete lines."""
    for path in journal.glob("*.jsonl"):
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.endswith("}\n"))


def handles_of(journal: Path) -> set[str]:
    return {record["handle"] for record in records_of(journal)}


def reuse(url: str, passages: Sequence[str]) -> list[list[int]]:
    """Hits and misses of each question."""
    client, counts = ServerClient(url), []
    for number in range(QUESTIONS):
        used = passages[number * PER_QUESTION :][:PER_QUESTION]
        _, stats = client.ask(f"Which note is number {number}?", used, max_tokens=4)
        counts.append([stats.hits, stats.misses])
    return counts


def campaign(folder: Path, passages: Sequence[str]) -> dict[str, Any]:
    """Ingest, kill, resume and ask. Returns the counts."""
    writes, journal, quarter = Writes(folder / "kv"), folder / "journal", len(passages) // 4
    servers = [ServerProcess(folder / "kv") for _ in range(2)]
    stored_at: dict[str, int] = {}

    def start() -> multiprocessing.process.BaseProcess:
        urls = [server.url for server in servers]
        worker = FORK.Process(target=work, args=(urls, journal, passages))
        worker.start()
        return worker

    worker = start()
    stored_at["worker killed"] = wait_for(writes, quarter, worker)
    kill(worker, servers)
    recorded_at = {"worker killed": len(handles_of(journal))}
    worker = start()
    stored_at["server killed"] = wait_for(writes, 2 * quarter, worker)
    servers[1].kill()
    stored_at["run killed"] = wait_for(writes, 3 * quarter, worker)
    kill(worker, servers[:1])
    recorded_at["run killed"] = len(handles_of(journal))
    servers[1] = ServerProcess(folder / "kv")
    worker = start()
    worker.join()
    resumed = [server.requests() for server in servers]
    last = start()
    last.join()
    again = [server.requests() for server in servers]
    records, stored = [*records_of(journal)], Counter(writes.of)
    reuse(servers[0].url, passages)  # stores the system message at its second use
    return {
        "passages": len(passages),
        "stored": len(stored),
        "stored_twice": sum(number > 1 for number in stored.values()),
        "recorded": len(handles_of(journal)),
        "stored_when": stored_at,
        "recorded_when": recorded_at,
        "recorded_by_each_server": sorted(Counter(r["server"] for r in records).values()),
        "recorded_as": Counter(record["done"] for record in records),
        "status_of_the_resumed_and_the_last_run": [worker.exitcode, last.exitcode],
        "requests_of_the_last_run": sum(again) - sum(resumed),
        "hits_and_misses_of_each_server": [reuse(server.url, passages) for server in servers],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=2000)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = campaign(folder, short_passages(options.passages))
    print(json.dumps(result, indent=2))
    first, second = result["hits_and_misses_of_each_server"]
    misses = sum(misses for _, misses in first + second)
    whole = {result[name] for name in ("passages", "stored", "recorded")}
    repeated = result["stored_twice"] + result["requests_of_the_last_run"]
    return int(len(whole) > 1 or bool(repeated or misses) or first != second)


if __name__ == "__main__":
    sys.exit(main())
