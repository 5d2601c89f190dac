"""Fixtures: the reference engine of this package, and a vLLM server with the connector."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# vLLM reads these variables when it is imported and in its child processes.
os.environ |= {
    "BLOCKATTN_RAG_MARKER_KEY": "a key of server and client",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "PYTHONPATH": str(Path(__file__).parent.parent),
}

from blockattn_rag.server.launch import STRUCTURED_OUTPUTS
from tests_vllm.reference import Reference
from tests_vllm.server import Server, serving


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The bundled model in this package's engine, in float32, with a store."""
    return Reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def team_server(reference: Reference) -> Iterator[Server]:
    """Server with the structured output settings of ``blockattn-rag serve``, namespace "team"."""
    more = ("--structured-outputs-config", json.dumps(STRUCTURED_OUTPUTS))
    yield from serving(reference, "remote", *more, namespace="team")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
