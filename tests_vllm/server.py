"""``vllm serve`` in a process of its own, asked over the loopback."""

from __future__ import annotations

import json
import os
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
    """An answer: its tokens and text, why it ended, the report on its blocks, and the usage."""

    tokens: list[int]
    text: str
    reason: str
    report: dict[str, Any]
    usage: dict[str, Any]


class Server:
    """A server of the bundled model, or of another one, with connector and endpoints.

    Args:
        options: the connector's; None: neither connector nor endpoints.
        log: a file for what it prints.
        more: further arguments of ``vllm serve``; of one that is given twice, the last counts.
        model: the folder of the model.
        environment: further variables.
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
                # What `vllm serve` runs; the command itself looks for a package that is named vllm.
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
        """Of the API server, whose children are the engine's processes."""
        return self._process.pid

    def wait(self) -> Server:
        """Return when it answers; raises RuntimeError with what it printed if it ended."""
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(self.log.read_text()[-4000:])
            try:
                if self.http.get("/health").is_success:
                    return self
            except httpx.TransportError:
                time.sleep(0.5)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """The answer to a body, which gets the model's name unless it asks to encode."""
        model = {} if path == ENCODE else {"model": NAME}
        return self.http.post(path, json={**model, **body}, headers=headers)

    def ask(self, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> Answered:
        """The answer to a body, of which the tokens are returned."""
        response = self.post(path, {"return_token_ids": True, **body}, **headers)
        assert response.status_code == 200, response.text
        data = response.json()
        (choice,) = data["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return Answered(
            choice["token_ids"], text, choice["finish_reason"], data["blockattn"], data["usage"]
        )

    def refusal(self, body: dict[str, Any], path: str = COMPLETIONS, status: int = 400) -> str:
        """The message with which a body is refused."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        return str(response.json()["error"]["message"])

    def client(self) -> ServerClient:
        """This package's client of the server."""
        return ServerClient(str(self.http.base_url), KEY)

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream. Leaving them early closes it."""
        asked = {"model": NAME, "stream": True, **body}
        with self.http.stream("POST", path, json=asked) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def counted(self, name: str) -> float:
        """The sum of a Prometheus counter or gauge."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    def kill(self) -> None:
        """End it and all its processes at once, as a crash does."""
        for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
            process.kill()
        self._process.wait()
        self.http.close()

    def close(self) -> None:
        """End it."""
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
    """Body of a fixture: a server whose store and log have a name of their own."""
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
