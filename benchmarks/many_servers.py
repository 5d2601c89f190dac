"""Ingest on two servers, kill a worker and a server, and count lost and duplicate passages.

    python benchmarks/many_servers.py > benchmarks/results/many-servers.json
    python benchmarks/many_servers.py --ray > benchmarks/results/many-servers-ray.json
    python benchmarks/many_servers.py --ray --vllm .venv-vllm/bin/python \
        > benchmarks/results/many-servers-vllm.json

Two servers with the bundled model share a folder store, whose writes are counted. By default, each
server process runs the fake server of the tests, which parses requests with the real server's code
and answers with this package's engine instead of vLLM. With --vllm, each is ``blockattn-rag serve``
in the environment of that interpreter. A worker process encodes short passages on both servers.
With --ray (which needs ``ray[data]``), the two workers of ``examples/ingest_ray.py`` do this.

After a quarter of the passages, a worker is killed and restarted. After half of them, a server is
killed. After three quarters, the run is killed and resumed with a new second server. A final run
repeats the complete ingestion, and both servers answer the same questions. The exit status is 1 if
a passage is lost or stored twice, if the final run sends a passage that is in the journal, or if a
passage is a miss on a server.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import psutil

from blockattn_rag import BlockModel, DirectoryStore
from blockattn_rag.app.demo.corpus import bundled_corpus
from blockattn_rag.server import ServerClient, ServerPool
from blockattn_rag.server.protocol import ENCODE
from tests.fake_server import FakeServer

EXAMPLE = Path(__file__).parents[1] / "examples" / "ingest_ray.py"
QUESTIONS, PER_QUESTION = 8, 4
FORK = multiprocessing.get_context("fork")
_MOVED_TO = 0x80
"""``IN_MOVED_TO`` of inotify."""
_UNFINISHED = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
_REQUESTS = f'blockattn_requests_total{{path="{ENCODE}"'
"""Metrics of the vLLM server."""


class Writes:
    """Counts how often each entry of a folder store was written (Linux: inotify).

    A thread reads the events. An entry is renamed to its final name when it is complete.
    """

    def __init__(self, store: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.inotify_init1(os.O_CLOEXEC)
        for number in range(256):
            folder = store / "objects" / f"{number:02x}"
            folder.mkdir(parents=True)
            if libc.inotify_add_watch(self._events, os.fsencode(folder), _MOVED_TO) < 0:
                raise OSError(ctypes.get_errno(), f"Cannot watch {folder} with inotify")
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
    """Fake server that counts the requests that it has answered."""

    answered = 0

    def encode(self, fields: Any) -> dict[str, Any]:
        try:
            return super().encode(fields)
        finally:
            self.answered += 1


def serve(store: Path, pipe: Connection) -> None:
    """Run a server in this process. Sends its address, then its request count when asked."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- answers to killed clients fail
    model = BlockModel.from_pretrained("bundled", device="cpu")
    server = CountingServer(model, DirectoryStore(store))
    with server.listening():
        pipe.send(server.url)
        while pipe.recv():
            pipe.send((len(server.bodies(ENCODE)), server.answered))


class ServerProcess:
    """A server in a separate process."""

    def __init__(self, store: Path) -> None:
        self._pipe, end = FORK.Pipe()
        self._process = FORK.Process(target=serve, args=(store, end), daemon=True)
        self._process.start()
        self.url: str = self._pipe.recv()

    def requests(self) -> int:
        """Wait until all encoding requests are answered, and return their number.

        vLLM cancels the requests of a client that died. The fake server completes them.
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


def children(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """Return all descendants of a process, or an empty list if it has exited."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_with_children(process: subprocess.Popen[Any]) -> None:
    for child in children(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    process.wait()


class VllmServer:
    """``blockattn-rag serve`` with vLLM. Its log is written next to the store.

    Args:
        python: Interpreter of an environment with vLLM.
    """

    def __init__(self, python: str, store: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = store.parent / f"server-{port}.log"
        serve = [python, "-m", "blockattn_rag", "serve", "bundled", "--store", str(store)]
        vllm = ["--enforce-eager", "--max-model-len", "2048"]
        self._process = subprocess.Popen(
            [*serve, "--port", str(port), "--", *vllm],
            env={
                **os.environ,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"The server did not start: {log.read_text()[-4000:]}")
        self.url = line.split()[-1]
        self._http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def requests(self) -> int:
        """Wait until the server is idle, and return the number of answered encoding requests."""
        while True:
            values = self._metrics()
            if not sum(value for name, value in values if name.startswith(_UNFINISHED)):
                return int(sum(v for name, v in values if name.startswith(_REQUESTS)))
            time.sleep(0.1)

    def _metrics(self) -> list[tuple[str, float]]:
        lines = self._http.get("/metrics").raise_for_status().text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return [(name, float(value)) for name, value in pairs]

    def kill(self) -> None:
        kill_with_children(self._process)


def work(urls: Sequence[str], folder: Path, passages: Sequence[str]) -> None:
    """Encode the passages on the servers, with a journal. Runs in a worker process."""
    ServerPool([ServerClient(url) for url in urls], folder / "journal").encode(passages)


AnyServer: TypeAlias = ServerProcess | VllmServer


class Run:
    """An ingestion in a separate process."""

    def __init__(self, urls: Sequence[str], folder: Path, passages: Sequence[str]) -> None:
        self._start = partial(FORK.Process, target=work, args=(urls, folder, passages))
        self._process = self._start()
        self._process.start()

    def is_running(self) -> bool:
        return self._process.is_alive()

    def kill_worker(self, servers: Sequence[AnyServer]) -> None:
        """Kill the worker, and restart it when the servers are idle."""
        self.kill()
        wait_until_idle(servers)
        self._process = self._start()
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


class RayRun:
    """An ingestion with the Ray Data example, in Ray's processes."""

    def __init__(self, urls: Sequence[str], folder: Path, passages: Sequence[str]) -> None:
        source, handles = folder / "passages.jsonl", folder / "handles"
        source.write_text("\n".join(json.dumps({"text": text}) for text in passages))
        servers = [argument for url in urls for argument in ("--server", url)]
        self._process = subprocess.Popen(
            [sys.executable, EXAMPLE, source, handles, "--journal", folder / "journal", *servers],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill_worker(self, servers: Sequence[AnyServer]) -> None:
        """Kill a worker. Ray restarts it, which takes longer than the requests in flight."""
        workers = [p for p in children(self._process) if "MapWorker" in " ".join(p.cmdline())]
        workers[0].kill()

    def kill(self) -> None:
        kill_with_children(self._process)

    def wait(self) -> int:
        return self._process.wait()


def wait_for(writes: Writes, stored: int, run: Run | RayRun) -> int:
    """Wait until at least ``stored`` entries are stored, and return the number of entries."""
    while len(writes.of) < stored:
        if not run.is_running():
            raise RuntimeError(f"The run ended before {stored} passages were stored")
        time.sleep(0.01)
    return len(writes.of)


def wait_until_idle(servers: Sequence[AnyServer]) -> None:
    for server in servers:
        server.requests()


def short_passages(count: int) -> list[str]:
    """Return distinct passages of one sentence each."""
    corpus = bundled_corpus()
    return [
        f"Note {number}. {corpus[number % len(corpus)].text.split('. ')[0]}."
        for number in range(count)
    ]


def records_of(journal: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the journal, without incomplete lines."""
    for path in journal.glob("*.jsonl"):
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.endswith("}\n"))


def handles_of(journal: Path) -> set[str]:
    return {record["handle"] for record in records_of(journal)}


def reuse(url: str, passages: Sequence[str]) -> list[list[int]]:
    """Ask questions, and return the hits and misses of each."""
    client, counts = ServerClient(url), []
    for number in range(QUESTIONS):
        used = passages[number * PER_QUESTION :][:PER_QUESTION]
        _, stats = client.ask(f"Which note is number {number}?", used, max_tokens=4)
        counts.append([stats.hits, stats.misses])
    return counts


def campaign(
    folder: Path,
    passages: Sequence[str],
    kind: type[Run] | type[RayRun],
    new_server: Callable[[Path], AnyServer],
) -> dict[str, Any]:
    """Ingest with the kills described above, and return the counts."""
    writes, journal, quarter = Writes(folder / "kv"), folder / "journal", len(passages) // 4
    servers = [new_server(folder / "kv") for _ in range(2)]
    wait_until_idle(servers)
    time.sleep(1)
    writes.of.clear()  # Discard what vLLM servers stored while they checked their answers.
    stored_at: dict[str, int] = {}

    def start() -> Run | RayRun:
        return kind([server.url for server in servers], folder, passages)

    run = start()
    stored_at["worker killed"] = wait_for(writes, quarter, run)
    run.kill_worker(servers)
    stored_at["server killed"] = wait_for(writes, 2 * quarter, run)
    servers[1].kill()
    stored_at["run killed"] = wait_for(writes, 3 * quarter, run)
    run.kill()
    wait_until_idle(servers[:1])
    recorded = len(handles_of(journal))
    servers[1] = new_server(folder / "kv")
    statuses = [start().wait()]
    resumed = [server.requests() for server in servers]
    statuses.append(start().wait())
    again = [server.requests() for server in servers]
    records, stored = [*records_of(journal)], Counter(writes.of)
    reuse(servers[0].url, passages)  # Store the system message, which happens on its second use.
    reused = [reuse(server.url, passages) for server in servers]
    return {
        "passages": len(passages),
        "stored": len(stored),
        "stored_twice": sum(number > 1 for number in stored.values()),
        "recorded": len(handles_of(journal)),
        "stored_when": stored_at,
        "recorded_when_the_run_was_killed": recorded,
        "recorded_by_each_server": sorted(Counter(r["server"] for r in records).values()),
        "recorded_as": Counter(record["done"] for record in records),
        "status_of_the_resumed_and_the_last_run": statuses,
        "requests_of_the_last_run": sum(again) - sum(resumed),
        "hits_and_misses_of_each_server": reused,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=2000)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--vllm", help="Interpreter of an environment with vLLM")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def new_server(store: Path) -> AnyServer:
            server = VllmServer(options.vllm, store) if options.vllm else ServerProcess(store)
            stack.callback(server.kill)
            return server

        kind = RayRun if options.ray else Run
        result = campaign(folder, short_passages(options.passages), kind, new_server)
    print(json.dumps(result, indent=2))
    first, second = result["hits_and_misses_of_each_server"]
    misses = sum(misses for _, misses in first + second)
    whole = {result[name] for name in ("passages", "stored", "recorded")}
    repeated = result["stored_twice"] + result["requests_of_the_last_run"]
    return int(len(whole) > 1 or bool(repeated or misses) or first != second)


if __name__ == "__main__":
    sys.exit(main())
