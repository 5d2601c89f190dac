"""Addresses and keys of servers; processes that fork."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from blockattn_rag.errors import ServingError
from blockattn_rag.server.client import RemoteEngine
from blockattn_rag.server.client.http import Client, background, server_url
from blockattn_rag.server.protocol import INFO, TENANT_HEADER
from tests.models import tiny_tokenizer
from tests.server.client.fake_server import FakeServer, Handler


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("http://gpu:8000", "http://gpu:8000"),
        ("http://gpu:8000/v1", "http://gpu:8000"),
        (" https://gateway/team/v1/ ", "https://gateway/team"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_an_address_may_end_as_those_of_openai_do(given: str, found: str) -> None:
    assert server_url(given) == found


@pytest.mark.parametrize(
    "given",
    [
        *("gpu:8000", "", "ftp://gpu", "http://", "http://a/v1?key=1", 3),
        *("http://gpu:99999", "http://gpu:port", "http://[::1", "http://gpu\0", "http://gpu:0"),
    ],
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="expected one such as http://gpu:8000"):
        RemoteEngine(given)


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ValueError, match="pass a key as api_key") as refused:
        RemoteEngine("http://me:the-secret@gpu:8000")
    assert "the-secret" not in str(refused.value)


@pytest.mark.parametrize("key", ["the secret", "the-secret\n", "the-sécret", b"the-secret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="invalid API key: expected printable") as refused:
        RemoteEngine("http://gpu:8000", api_key=key)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_timeout_is_above_zero(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        RemoteEngine("http://gpu:8000", timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("headers", "content", "message"),
    [
        ({"Content-Encoding": "gzip"}, b"no such thing", "cannot read the answer"),
        ({}, b"data: " + b"[" * 100_000 + b"\n\n", "expected a chunk of a completion"),
    ],
)
def test_an_answer_that_cannot_be_read_is_told(
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    content: bytes,
    message: str,
) -> None:
    def answer(handler: Handler, path: str, _body: Any) -> None:
        if path == INFO:
            handler.send_json(200, server.info)
            return
        handler.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)

    monkeypatch.setattr(server, "answer", answer)
    engine = RemoteEngine(server.url, tokenizer=tiny_tokenizer())
    with pytest.raises(ServingError, match=message):
        engine.generate(["A passage.", "Why?"])


_FORKS = """
import os, sys
from blockattn_rag.server.client import RemoteEngine
from tests.models import tiny_tokenizer

engine = RemoteEngine(sys.argv[1], tokenizer=tiny_tokenizer())
print(len(engine.generate(["A passage.", "Why?"], max_new_tokens=2).token_ids), flush=True)
child = os.fork()
print(len(engine.generate(["A passage.", "Why?"], max_new_tokens=3).token_ids), flush=True)
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_asks_by_connections_of_its_own(server: FakeServer) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS, server.url], capture_output=True, text=True
    )
    assert run.stdout.split() == ["2", "3", "3"], run.stderr
    assert run.returncode == 0


def test_headers_are_sent_with_every_request(server: FakeServer) -> None:
    server.tenants = True
    headers = {TENANT_HEADER: "a-tenant"}
    client = Client(server.url, None, 60.0, 0, headers)
    assert background.start(client.get(INFO)).result()["namespace"] == "a-tenant"
    plain = Client(server.url, None, 60.0, 0)
    assert background.start(plain.get(INFO)).result()["namespace"] == ""
