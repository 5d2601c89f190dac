"""Fault injection for object stores: a proxy server that breaks some responses, and a campaign of
many concurrent readers and writers."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import KVStore
from tests.store.kvs import same

Fault = Literal[
    "none", "503", "truncated", "other bytes", "other range", "flipped bit", "slow", "hangs",
    "hangs within",
]  # fmt: skip
SLOW_S = 0.1
LONGEST_HANG_S = 30.0


class FaultyServer(ThreadingHTTPServer):
    """Proxy of an HTTP server that injects faults at the given rates.

    Args:
        upstream: Address of the server.
        faults: Share of requests with each fault. Other responses are forwarded unchanged.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str, faults: Mapping[Fault, float], seed: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.faults = dict(faults)
        self.made: Counter[str] = Counter()
        self.ended = threading.Event()
        self._choose = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_fault(self) -> Fault:
        with self._lock:
            names, shares = list(self.faults), list(self.faults.values())
            whole = 1.0 - sum(shares)
            fault: Fault = self._choose.choices(["none", *names], [whole, *shares])[0]
            self.made[fault] += 1
            return fault

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect after a timeout."""


@contextlib.contextmanager
def faulty(upstream: str, faults: Mapping[Fault, float], seed: int = 0) -> Iterator[FaultyServer]:
    """Run a ``FaultyServer``. Hanging requests are released at the end."""
    server = FaultyServer(upstream, faults, seed)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.next_fault()
        if fault == "hangs":
            self.server.ended.wait(LONGEST_HANG_S)
            self.close_connection = True
            return
        if fault == "slow":
            time.sleep(SLOW_S)
        if fault == "503":
            self._answer(503, {"Content-Length": "0"}, b"")
            return
        headers = {name.title(): value for name, value in self.headers.items()}
        asked = headers.get("Range")
        if fault in ("other bytes", "other range") and asked:
            first, last = asked.removeprefix("bytes=").split("-")
            headers["Range"] = f"bytes={int(first) + 8}-{int(last) + 8}"
        status, found, content = self._passed_on(headers, body)
        if fault == "other bytes" and asked and status == 206:
            found["Content-Range"] = _claimed(asked, found["Content-Range"], len(content))
        if fault == "flipped bit" and content and self.command == "GET":
            at = len(content) // 2
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        if fault in ("truncated", "hangs within") and content:
            content = content[: len(content) // 2]
            self.close_connection = True
        self._answer(status, found, content)
        if fault == "hangs within":
            self.server.ended.wait(LONGEST_HANG_S)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_any  # noqa: N815

    def _passed_on(
        self, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=LONGEST_HANG_S)
        with contextlib.closing(upstream):
            upstream.request(self.command, self.path, body, {**headers, "Connection": "close"})
            answer = upstream.getresponse()
            content = answer.read()
            hop = ("connection", "transfer-encoding", "content-length")
            found = {n: v for n, v in answer.getheaders() if n.lower() not in hop}
            length = str(len(content))
            if self.command == "HEAD":
                length = answer.getheader("Content-Length") or "0"
            return answer.status, {**found, "Content-Length": length}, content

    def _answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Discard log messages."""


def _claimed(asked: str, found: str, nbytes: int) -> str:
    """Return a Content-Range that falsely claims to be the requested range."""
    first = int(asked.removeprefix("bytes=").split("-")[0])
    return f"bytes {first}-{first + nbytes - 1}/{found.rpartition('/')[2]}"


def campaign(store: KVStore, kvs: Sequence[BlockKV], *, reads: int, late_s: float) -> Counter[str]:
    """Read random blocks in 32 threads while 4 threads write them. Returns the number of each
    outcome. ``found``, ``absent`` and ``failed`` are allowed. ``wrong`` (not the block that was
    put) and ``late`` (a call that took longer than ``late_s``) are errors."""
    ended = threading.Event()

    def read(seed: int) -> Counter[str]:
        choose = random.Random(seed)
        asked = choose.sample(list(kvs), choose.randint(1, 4))
        started = time.monotonic()
        found = store.get_many([kv.key for kv in asked])
        is_late = time.monotonic() - started > late_s
        outcomes = Counter(_judged(one, kv) for one, kv in zip(found, asked, strict=True))
        return outcomes + Counter(reads=1, late=int(is_late))

    def write(seed: int) -> Counter[str]:
        choose, outcomes = random.Random(seed), Counter[str]()
        while not ended.is_set():
            kv = choose.choice(kvs)
            try:
                store.put(kv.key, kv)
                outcomes["written"] += 1
            except StoreError:
                outcomes["not written"] += 1
        return outcomes

    with ThreadPoolExecutor(36) as pool:
        writing = [pool.submit(write, number) for number in range(4)]
        try:
            outcomes = sum(pool.map(read, range(reads)), Counter())
        finally:
            ended.set()
        return sum((one.result() for one in writing), outcomes)


def _judged(found: BlockKV | StoreError | None, expected: BlockKV) -> str:
    if found is None:
        return "absent"
    if isinstance(found, StoreError):
        return "failed"
    return "found" if same(found, expected) else "wrong"
