"""A tiny model, a server with it, and an engine of this process to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.model import BlockModel
from blockattn_rag.server.client import RemoteEngine, http
from blockattn_rag.store import MemoryStore
from tests.engines import tuned_model
from tests.models import tiny_tokenizer
from tests.server.client.fake_server import FakeServer

Serve = Callable[..., FakeServer]


@pytest.fixture(scope="session")
def block_model() -> BlockModel:
    return tuned_model()


@pytest.fixture(autouse=True)
def _directly_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy between the test and its server, and no pause before a new try."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(http, "_PAUSE_S", 0.0)


@pytest.fixture
def serve(block_model: BlockModel) -> Iterator[Serve]:
    """Starts a server, which ends with the test."""
    with ExitStack() as stack:

        def start(**options: Any) -> FakeServer:
            server = FakeServer(block_model, **options)
            stack.enter_context(server.listening())
            return server

        yield start


@pytest.fixture
def server(serve: Serve) -> FakeServer:
    return serve()


@pytest.fixture
def engine(server: FakeServer) -> RemoteEngine:
    return RemoteEngine(server.url, tokenizer=tiny_tokenizer())


@pytest.fixture
def local(block_model: BlockModel) -> BlockAttentionEngine:
    """The measure: an engine over the same model. It keeps no tails; what servers do is theirs."""
    return BlockAttentionEngine(block_model, MemoryStore(1 << 28), resident_bytes=0)
