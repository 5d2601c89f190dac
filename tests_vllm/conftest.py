"""Engines of vLLM with the connector, and what this package's own engine answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Read by vLLM when it is imported, and by the processes that it starts.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "PYTHONPATH": str(Path(__file__).parent.parent),
}

from blockattn_rag.server.client import RemoteEngine
from tests_vllm.reference import MODEL, Reference
from tests_vllm.server import KEY, Server


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The bundled model in this package's engine, float32, and a store that it fills."""
    return Reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture
def engine(server: Server, monkeypatch: pytest.MonkeyPatch) -> RemoteEngine:
    """This package's client, of the server that the test's file starts."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return RemoteEngine(str(server.http.base_url), tokenizer=MODEL, api_key=KEY)
