"""``vllm serve`` in a separate process, on the loopback interface."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from blockattn_rag import ServerClient
from blockattn_rag.server.protocol import ENCODE, OPENAI
from tests_vllm.reference import MODEL, Reference

CHATS = f"{OPENAI}/chat/completions"
COMPLETIONS = f"{OPENAI}/completions"
NAME = "bundled"
KEY = "key-of-the-server"


class Answered(NamedTuple):
    """Answer: tokens, text, finish reason, report on its blocks, and usage."""

    tokens: list[int]
    text: str
    reason: str
    report: dict[str, Any]
    usage: dict[str, Any]


class Server:
    """Server of the bundled model or another one, with the connector and the endpoints.

    Args:
        options: Options of the connector. None: Neither connector nor endpoints.
        log: File for the output of the server.
        more: Further arguments of ``vllm serve``, which override earlier ones.
        model: Folder of the model.
        environment: Further environment variables.
    """

    def __init__(
        self,
        options: dict[str, Any] | None,
        log: Path,
        *more: str,
        model: str = MODEL,
        environment: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        transfer = {
            "kv_connector": "BlockAttentionConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        }
        connector = [] if options is None else ["--kv-transfer-config", json.dumps(transfer)]
        plugins = {} if options is None else {"VLLM_PLUGINS": "blockattn"}
        self.log = log
        self._process = subprocess.Popen(
            [
                # The module that `vllm serve` runs. The command itself needs a package named vllm.
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
                *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME),
                *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
                *(*connector, "--api-key", KEY, *more),
            ],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **plugins, **(environment or {})},
        )
        headers = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60, trust_env=False
        )

    @property
    def pid(self) -> int:
        """Process id of the API server, whose children are the processes of the engine."""
        return self._process.pid

    def wait(self) -> Server:
        """Wait until the server is healthy. Raises RuntimeError with the log if it exits."""
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(self.log.read_text()[-4000:])
            try:
                if self.http.get("/health").is_success:
                    return self
            except httpx.TransportError:
                time.sleep(0.5)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """Send a body, with the name of the model unless the path is that for encoding."""
        model = {} if path == ENCODE else {"model": NAME}
        return self.http.post(path, json={**model, **body}, headers=headers)

    def ask(self, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> Answered:
        """Send a body that requests token ids. Returns the answer."""
        response = self.post(path, {"return_token_ids": True, **body}, **headers)
        assert response.status_code == 200, response.text
        data = response.json()
        (choice,) = data["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return Answered(
            choice["token_ids"], text, choice["finish_reason"], data["blockattn"], data["usage"]
        )

    def refusal(self, body: dict[str, Any], path: str = COMPLETIONS, status: int = 400) -> str:
        """Send a body that must be refused. Returns the error message."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        return str(response.json()["error"]["message"])

    def client(self) -> ServerClient:
        """Return a client of this package for the server."""
        return ServerClient(str(self.http.base_url), KEY)

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream, which is closed if the caller stops early."""
        asked = {"model": NAME, "stream": True, **body}
        with self.http.stream("POST", path, json=asked) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def counted(self, name: str) -> float:
        """Return the sum of a Prometheus counter or gauge over all labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[{{ ]", line))

    def kill(self) -> None:
        """Kill the server and all of its processes, as in a crash."""
        for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
            process.kill()
        self._process.wait()
        self.http.close()

    def close(self) -> None:
        """Terminate the server."""
        self.http.close()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serving(
    reference: Reference,
    name: str,
    *more: str,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[Server]:
    """Body of fixtures: run a server whose store and log have this name."""
    folder = reference.folder
    server = Server(
        reference.options(store=str(folder / name), **options),
        folder / f"{name}.log",
        *more,
        environment=environment,
    )
    try:
        yield server.wait()
    finally:
        server.close()
