"""Shared configuration and fixtures: repeatable examples, devices, and a Chroma server."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import settings

from tests.holding import LONGEST_S, Held, holding
from tests.store.servers import free_port

# Prevents tests from writing a key file to the user's home folder.
os.environ["BLOCKATTN_RAG_MARKER_KEY"] = "the key of the tests"

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# No deadline, because it would fail randomly on busy machines.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Restore the logger, which commands and benchmarks configure for their process."""
    logger = logging.getLogger("blockattn_rag")
    level = logger.level
    logger.propagate = True  # a command run by a fixture may have changed it
    yield
    logger.setLevel(level)
    logger.propagate = True


@pytest.fixture(params=DEVICES)
def device(request: Any) -> Iterator[torch.device]:
    """Run the test on each available device, with new tensors on that device."""
    with torch.device(request.param) as chosen:
        yield chosen


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model, marked as block-fine-tuned, and its tokenizer."""
    from tests.engines import tuned_model  # local: other tests need no transformers

    path = tmp_path_factory.mktemp("model")
    model = tuned_model()
    model.hf_model.save_pretrained(path)
    model.tokenizer.tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the calls of ``BlockAttentionEngine.from_pretrained`` during the test."""
    from blockattn_rag import BlockAttentionEngine

    seen: list[Any] = []
    original = BlockAttentionEngine.from_pretrained

    def spy(model: Any, **kwargs: Any) -> BlockAttentionEngine:
        seen.append((model, kwargs))
        return original(model, **kwargs)

    monkeypatch.setattr(BlockAttentionEngine, "from_pretrained", spy)
    return seen


@pytest.fixture
def held() -> Iterator[Held]:
    """Pause models after each token until the test lets them continue."""
    with holding() as held:
        yield held


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def chroma_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a Chroma server on this machine."""
    port = free_port()
    chroma = shutil.which("chroma", path=str(Path(sys.executable).parent))
    assert chroma is not None, "expected the command `chroma` next to python: install chromadb"
    data = str(tmp_path_factory.mktemp("chroma-server"))
    command = [chroma, "run", "--host", "127.0.0.1", "--port", str(port), "--path", data]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/v2/heartbeat", process)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=LONGEST_S)


@pytest.fixture(params=["embedded", "server"])
def chroma_client(request: Any, tmp_path: Path) -> Any:
    """A Chroma client, embedded and as a server in turn."""
    import chromadb
    from chromadb.config import Settings

    # Clients modify their settings, so each test creates new ones.
    settings = Settings(anonymized_telemetry=False)
    if request.param == "embedded":
        return chromadb.PersistentClient(str(tmp_path / "chroma"), settings=settings)
    port = request.getfixturevalue("chroma_server")
    return chromadb.HttpClient("127.0.0.1", port, settings=settings)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 4 * LONGEST_S
    while time.monotonic() < until:
        assert process.poll() is None, "the Chroma server exited"
        try:
            httpx.get(url, trust_env=False)
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"no answer from {url}")
