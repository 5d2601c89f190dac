"""Ingest on two servers with Ray Data, kill what can be killed, and count what is lost or repeated.

    python benchmarks/many_servers.py --output benchmarks/results/many-servers.json

Two vLLM servers of the bundled model share a folder store, whose writes are counted.
``examples/ingest_ray.py`` encodes short passages. At a quarter of them, a Ray worker is killed; at
half, one server with its engine; at three quarters, the run itself. It is started again while that
server is down, and once more with a new second server. Then both servers answer the same
questions. Exit status 1 if a passage is lost or stored twice, if the last run sends a request
although the journal has all passages, or if a server misses a passage.

It runs in the environment of `make test-vllm`, with `ray[data]` installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import typer
from serving_load import ENVIRONMENT, host

from blockattn_rag.app.demo.corpus import bundled_corpus
from blockattn_rag.files import write_json
from tests.store.servers import free_port
from tests_vllm.server import KEY, Server

EXAMPLE = Path(__file__).parents[1] / "examples" / "ingest_ray.py"
QUESTIONS, PER_QUESTION = 8, 4
_MOVED_TO = 0x80
"""``IN_MOVED_TO`` of inotify."""


class Writes:
    """Counts how often each entry of a folder store was written (Linux: inotify).

    A thread reads the events: an entry gets its name when it is complete.
    """

    def __init__(self, store: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = self._libc.inotify_init1(os.O_CLOEXEC)
        for number in range(256):
            folder = store / "objects" / f"{number:02x}"
            folder.mkdir(parents=True)
            if self._libc.inotify_add_watch(self._events, os.fsencode(folder), _MOVED_TO) < 0:
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


def short_passages(count: int) -> list[str]:
    """Distinct passages of one sentence."""
    corpus = bundled_corpus()
    return [
        f"Note {number}. {corpus[number % len(corpus)].text.split('. ')[0]}."
        for number in range(count)
    ]


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    for child in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


@contextlib.contextmanager
def ray_cluster(folder: Path) -> Iterator[psutil.Process]:
    """Ray on this machine, whose address is in the environment: its first process."""
    port = free_port()
    command = ["start", "--head", "--block", "--num-cpus=4", "--include-dashboard=false"]
    command += [f"--port={port}", "--object-store-memory=200000000", "--node-ip-address=127.0.0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *command],
        stdout=(folder / "ray.log").open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, **ENVIRONMENT},
    )
    os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
    try:
        while "Ray runtime started" not in (folder / "ray.log").read_text():
            if process.poll() is not None:
                raise RuntimeError("Ray did not start")
            time.sleep(0.5)
        yield psutil.Process(process.pid)
    finally:
        kill_tree(process)


class Run:
    """The example in a process of its own.

    Args:
        folder: Folder of the passages, the journal and the results.
        ray: First process of Ray, which starts the workers.
        writes: Counts of the store.
    """

    def __init__(
        self, folder: Path, urls: Sequence[str], ray: psutil.Process, writes: Writes
    ) -> None:
        self._ray, self._writes = ray, writes
        handles = folder / "handles"
        shutil.rmtree(handles, ignore_errors=True)  # of an earlier run
        servers = [part for url in urls for part in ("--server", url)]
        self._process = subprocess.Popen(
            [
                *(sys.executable, str(EXAMPLE), str(folder / "passages.jsonl")),
                *(str(handles), "--journal", str(folder / "journal"), *servers),
            ],
            stdout=(folder / "run.log").open("a"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "BLOCKATTN_RAG_API_KEY": KEY, "NO_PROXY": "*"},
        )

    def wait_for(self, stored: int) -> None:
        """Wait until so many entries are stored."""
        while len(self._writes.of) < stored:
            if self._process.poll() is not None:
                raise RuntimeError(f"The run ended before {stored} passages were stored")
            time.sleep(0.05)

    def kill_worker(self) -> None:
        """Kill one actor of the pool."""
        workers = [
            process
            for process in self._ray.children(recursive=True)
            if "MapWorker(MapBatches(Encoder))" in " ".join(process.cmdline())
        ]
        workers[0].kill()

    def kill(self) -> None:
        kill_tree(self._process)

    def wait(self) -> None:
        if self._process.wait():
            raise RuntimeError(f"The run failed with status {self._process.returncode}")


def journal_of(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def reuse(server: Server, passages: Sequence[str]) -> list[dict[str, int]]:
    """Hits and misses of the passages of each question."""
    client, found = server.client(), []
    for number in range(QUESTIONS):
        used = passages[number * PER_QUESTION :][:PER_QUESTION]
        _, stats = client.ask(f"Which note is number {number}?", used, max_tokens=4)
        found.append({"hits": stats.hits, "misses": stats.misses})
    return found


def campaign(
    folder: Path, passages: Sequence[str], start: Callable[[], Server], writes: Writes
) -> dict[str, Any]:
    """Run, kill, resume and ask. Returns the counts."""
    lines = [json.dumps({"number": n, "text": text}) for n, text in enumerate(passages)]
    (folder / "passages.jsonl").write_text("\n".join(lines))
    servers = [start(), start()]
    with ray_cluster(folder) as ray:
        for server in servers:
            server.wait()
        result = ingestion(folder, passages, servers, start, ray, writes)
    return result | {"questions": [reuse(server, passages) for server in servers]}


def ingestion(
    folder: Path,
    passages: Sequence[str],
    servers: list[Server],
    start: Callable[[], Server],
    ray: psutil.Process,
    writes: Writes,
) -> dict[str, Any]:
    """The three runs, and what is killed. Replaces the killed server in ``servers``."""
    urls, quarter = [str(server.http.base_url) for server in servers], len(passages) // 4
    run = Run(folder, urls, ray, writes)
    run.wait_for(quarter)
    run.kill_worker()
    at_worker = len(writes.of)
    run.wait_for(2 * quarter)
    servers[1].kill()
    third = start()
    at_server = len(writes.of)
    run.wait_for(3 * quarter)
    run.kill()
    at_run = len(writes.of)
    recorded = len({record["handle"] for record in journal_of(folder / "journal")})
    Run(folder, urls, ray, writes).wait()  # with the address of the killed server
    servers[1] = third.wait()
    asked = [server.counted("blockattn_requests_total") for server in servers]
    Run(folder, [str(server.http.base_url) for server in servers], ray, writes).wait()
    asked_again = [server.counted("blockattn_requests_total") for server in servers]
    journal = journal_of(folder / "journal")
    return {
        "passages": len(passages),
        "stored_when_killed": {"worker": at_worker, "server": at_server, "run": at_run},
        "recorded_when_the_run_was_killed": recorded,
        "rows_with_handles": sum(
            bool(json.loads(line)["kv_handle"])
            for path in (folder / "handles").glob("*.json*")
            for line in path.read_text().splitlines()
        ),
        "recorded": len({record["handle"] for record in journal}),
        "recorded_by_server": Counter(record["server"] for record in journal),
        "recorded_as": Counter(record["done"] for record in journal),
        "entries": len(writes.of),
        "written_twice": sum(number > 1 for number in writes.of.values()),
        "requests_of_the_last_run": sum(asked_again) - sum(asked),
    }


def main(passages: int = 2000, output: Path | None = None) -> None:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "NO_PROXY": "*"}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        numbers, writes = iter(range(9)), Writes(folder / "kv")

        def start() -> Server:
            options = {"store": str(folder / "kv"), "memory": "64MiB"}
            log = folder / f"server-{next(numbers)}.log"
            more = ("--disable-uvicorn-access-log", "--num-gpu-blocks-override", "64")
            server = Server(options, log, *more, environment=ENVIRONMENT)
            stack.callback(server.close)
            return server

        began = time.monotonic()
        try:
            result = campaign(folder, short_passages(passages), start, writes)
        except BaseException:
            for log in sorted(folder.glob("*.log")):
                print(f"== {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
            raise
        result |= {"seconds": time.monotonic() - began, "machine": host()}
    print(json.dumps(result, indent=2))
    if output is not None:
        write_json(output, result)
    misses = [one["misses"] for answers in result["questions"] for one in answers[1:]]
    whole = {result[name] for name in ("passages", "rows_with_handles", "recorded", "entries")}
    repeated = (result["written_twice"], result["requests_of_the_last_run"], sum(misses))
    sys.exit(len(whole) > 1 or any(repeated))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
