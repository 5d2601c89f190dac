"""Local servers that the store tests start and stop."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import httpx

from tests.holding import LONGEST_S

BUCKET = "bucket"
HAS_MOTO = find_spec("moto") is not None and find_spec("obstore") is not None
HAS_REDIS = shutil.which("redis-server") is not None and find_spec("redis") is not None

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "an access key of tests",
    "AWS_SECRET_ACCESS_KEY": "a secret of tests",
    "AWS_REGION": "us-east-1",
}


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's S3 server with one bucket. Yields its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    def answers() -> bool:
        return httpx.get(f"{url}/moto-api/", trust_env=False).is_success

    with _running(command, answers):
        httpx.put(f"{url}/{BUCKET}", trust_env=False).raise_for_status()
        yield url


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """Run a Redis server that writes no files. Yields its address."""
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]

    def answers() -> bool:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"PING\r\n")
            return bool(connection.recv(64))

    with _running([*command, "--save", "", "--appendonly", "no", *options], answers):
        yield f"redis://127.0.0.1:{port}/0"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _running(command: Sequence[str], answers: Callable[[], bool]) -> Iterator[None]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        until = time.monotonic() + 4 * LONGEST_S
        while True:
            assert process.poll() is None, f"{command[0]} ended"
            assert time.monotonic() < until, f"no answer from {command}"
            with contextlib.suppress(OSError, httpx.TransportError):
                if answers():
                    break
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(timeout=LONGEST_S)
