"""The examples answer by a server, as the guide says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from blockattn_rag.model import BlockModel
from blockattn_rag.serving.config import CONNECTOR, ServingConfig
from blockattn_rag.serving.endpoint import COMPLETIONS, ENCODE
from tests.remote.fake_server import FakeServer

EXAMPLES = Path(__file__).parents[1] / "examples"
ANSWER = "The height of Halden Tower is 214 metres."


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    fake = FakeServer(BlockModel.from_pretrained("bundled", device="cpu"), name="bundled")
    with fake.listening():
        yield fake


@pytest.mark.parametrize("name", ["ask_llama_index.py", "ask_langchain.py"])
def test_an_example_answers_by_a_server(server: FakeServer, name: str) -> None:
    server.requests.clear()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), f"{server.url}/v1"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == ANSWER
    assert len(server.bodies(ENCODE)) == len(server.bodies(COMPLETIONS)) == 1


def test_the_options_of_the_example_are_those_of_the_connector() -> None:
    options = yaml.safe_load((EXAMPLES / "serve_bundled.yaml").read_text("utf-8"))
    transfer = options["kv-transfer-config"]
    assert transfer["kv_connector"] == CONNECTOR
    assert ServingConfig.parse(transfer["kv_connector_extra_config"]).profile == "profile.json"
