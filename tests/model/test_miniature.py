"""Miniatures: architectures are tested before their weights are loaded."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model import BlockModel, loading
from blockattn_rag.model.miniature import check_architecture, miniature
from tests.model.families import KINDS

CONFIGS = {
    "org/refused": {"model_type": "deepseek_v32"},
    "org/gpt2": {"model_type": "gpt2"},
    "org/dynamic": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    },
    "org/works": {"model_type": "deepseek_v3"},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[list[str]]:
    """A hub that only has the configs of some models. The list has the paths of all requests."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            seen.append(self.path)
            _, owner, name, *rest = self.path.split("/")
            config = CONFIGS.get(f"{owner}/{name}")
            found = config is not None and rest[-1] == "config.json"
            content = json.dumps(config).encode() if found else b""
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "0" * 40)
            if not found:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "hub_errors", lambda *_, **__: nullcontext())
    yield seen
    server.shutdown()
    server.server_close()


def files(requests: list[str]) -> set[str]:
    """Return the names of the requested files."""
    return {path.rpartition("/")[2] for path in requests if "/resolve/" in path}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("org/refused", "sparse attention with an indexer"),
        ("org/gpt2", "not plain rotary"),
        ("org/dynamic", "type is 'dynamic'"),
    ],
)
def test_an_unsupported_model_of_the_hub_is_refused_before_its_download(
    hub: list[str], name: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        BlockModel.from_pretrained(name)
    assert "such as Qwen3" in str(error.value) or "rope_parameters" in str(error.value)
    assert files(hub) == {"config.json"}


def test_other_models_of_the_hub_are_downloaded(hub: list[str]) -> None:
    with pytest.raises((OSError, ValueError)):
        BlockModel.from_pretrained("org/works")
    assert any("tokenizer" in path for path in files(hub))


@pytest.mark.parametrize("kind", KINDS)
def test_a_miniature_has_the_same_kinds_of_layers_as_the_original(kind: str) -> None:
    family, settings, _ = KINDS[kind]
    config = AutoConfig.for_model(family, **settings)
    model = miniature(config)
    small, types = (get_layer_types_and_kwargs(one)[0] for one in (model.config, config))
    assert {*small} == {*types}
    assert len(small) < len(types) or len(types) <= 4
    assert sum(weights.numel() for weights in model.parameters()) < 2_000_000


def test_architectures_without_a_miniature_are_tested_after_loading() -> None:
    assert check_architecture(AutoConfig.for_model("xmod")) is None  # cannot be run
    config = AutoConfig.for_model("llama")
    config.hidden_act = "unknown"
    assert check_architecture(config) is None  # cannot be built


def test_windows_without_effect_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="sliding windows have no effect"):
        check_architecture(AutoConfig.for_model("moshi"))
    assert check_architecture(AutoConfig.for_model("gemma2")) is not None
