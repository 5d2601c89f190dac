"""Requests are answered without delay even if the store cannot be written."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import psutil
import pytest

from blockattn_rag.server.protocol import ENCODE
from blockattn_rag.store import DirectoryStore
from tests_vllm.reference import Reference
from tests_vllm.server import Server, serving

MOST_FILE_BYTES = 1024
AT_ONCE_S = 20
"""Much less than the time that a server waits for an unresponsive store."""


@pytest.fixture
def store(reference: Reference) -> DirectoryStore:
    return DirectoryStore(reference.folder / "full")


@pytest.fixture
def server(reference: Reference, store: DirectoryStore) -> Iterator[Server]:
    """A server whose processes cannot write files as large as an entry."""
    for server in serving(reference, "full"):
        for process in psutil.Process(server.pid).children(recursive=True):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MOST_FILE_BYTES,) * 2)
        yield server


def test_requests_are_answered_with_a_full_store(
    reference: Reference, store: DirectoryStore, server: Server
) -> None:
    case = reference.case(10)
    for encoded in (len(case.lengths), 0):
        began = time.monotonic()
        answer = server.ask(case.body())
        assert time.monotonic() - began < AT_ONCE_S
        assert answer.tokens == reference.answer(case)
        assert answer.report["misses"] == encoded
    refused = server.post(ENCODE, {"texts": reference.case(20).texts[1:-1]})
    assert refused.status_code == 503
    assert "File too large" in refused.json()["error"]["message"]
    assert list(store.keys()) == []
