"""A fake ``vllm`` module whose API server is a small script with a child process."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.holding import LONGEST_S

_SCRIPT = """
import json, os, socket, subprocess, sys, threading, time

options = dict(zip(sys.argv, sys.argv[1:]))
upstream = int(os.environ.get("FAKE_UPSTREAM", 0))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
told = {"child": child.pid, "options": sys.argv[1:], "environment": dict(os.environ)}
with open(os.environ["FAKE_TOLD"] + ".new", "w") as file:
    json.dump(told, file)
os.rename(os.environ["FAKE_TOLD"] + ".new", os.environ["FAKE_TOLD"])
print("the log of the fake", flush=True)
if "--die" in options:
    child.kill()
    print("(EngineCore pid=1) ERROR blockattn_rag.errors.ServingError: the cause")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(3)


def pump(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)
    sink.close()


def answer(client):
    if not upstream:
        client.recv(65536)
        client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
        client.close()
        return
    server = socket.create_connection(("127.0.0.1", upstream))
    threading.Thread(target=pump, args=(server, client), daemon=True).start()
    pump(client, server)


if "--never-healthy" in options:
    time.sleep(300)
with socket.create_server((options["--host"], int(options["--port"]))) as listener:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=answer, args=(client,), daemon=True).start()
"""


@dataclass(frozen=True)
class FakeVllm:
    """The fake module in a folder, and access to the process that it last started."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which processes import the fake module."""
        path = os.pathsep.join([str(self.folder), str(Path(__file__).parents[2])])
        return {**os.environ, "PYTHONPATH": path, "FAKE_TOLD": str(self.folder / "told.json")}

    def told(self) -> Any:
        """Wait until the server has started. Returns its child, options and environment."""
        file, until = self.folder / "told.json", time.monotonic() + LONGEST_S
        while not file.exists():
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.01)
        return json.loads(file.read_text("utf-8"))

    def assert_ended(self) -> None:
        """Check that no process of the server is left."""
        child, until = self.told()["child"], time.monotonic() + LONGEST_S
        while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
            assert time.monotonic() < until, "the child of the server is still running"
            time.sleep(0.01)


def fake_vllm(folder: Path) -> FakeVllm:
    """Write the fake module to a folder."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for one in (package, package.parent, package.parent.parent):
        (one / "__init__.py").write_text("")
    (package / "api_server.py").write_text(_SCRIPT)
    return FakeVllm(folder)


COMMAND = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
