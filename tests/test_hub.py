from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.hub import existing_model, hub_errors
from blockattn_rag.langchain import ChatBlockAttention
from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.model.loading import load_config, load_model, load_tokenizer

LOADERS: list[Any] = [
    load_tokenizer, load_config, load_model, BlockAttentionEngine.from_pretrained,
    BlockAttentionLLM, lambda name: ChatBlockAttention(model=name),
]  # fmt: skip
EACH_LOADER = pytest.mark.parametrize("load", LOADERS)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A hub that closes every connection. The list has one item per connection."""
    seen: list[int] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                seen.append(0)
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield seen
        server.shutdown(socket.SHUT_RDWR)


@EACH_LOADER
def test_an_unreachable_hub_is_tried_once(load: Any, hub: list[int]) -> None:
    with pytest.raises(OSError, match="Cannot load some/model: ") as error:
        load("some/model")
    message = str(error.value)
    assert "neither a local path nor in the hub's cache" in message
    assert f"the hub {constants.ENDPOINT} cannot be reached" in message
    assert "expected a folder, a .gguf file, a hub id" in message
    assert len(hub) == 1


@EACH_LOADER
@pytest.mark.parametrize("name", ["./nope", "/nope/model", "~/nope", "models/a/b", "my model"])
def test_a_mistyped_path_is_named(load: Any, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"No such model: {name}; expected a folder"):
        load(name)


def test_names_of_models_are_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.GGUF").touch()
    for name in (None, "bundled", "gpt2", "org/model", str(tmp_path), str(tmp_path / "a.GGUF")):
        assert existing_model(name) == name
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"Found the file .*model\.safetensors, expected a"):
        existing_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_hub_is_probed_once_for_several_loads(
    monkeypatch: pytest.MonkeyPatch, is_reachable: bool
) -> None:
    probed: list[str] = []

    def head(url: str, timeout: float) -> None:
        probed.append(url)
        if not is_reachable:
            raise httpx.ConnectError("refused")

    hub = f"http://hub/{is_reachable}"
    monkeypatch.setattr("blockattn_rag.hub.time.monotonic", lambda: 1.0)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("some/model", "some/model", "other/model"):
        with hub_errors(name):
            assert constants.HF_HUB_OFFLINE is not is_reachable
            with hub_errors(name):  # nested, as in another thread
                assert constants.HF_HUB_OFFLINE is not is_reachable
            assert constants.HF_HUB_OFFLINE is not is_reachable
        assert constants.HF_HUB_OFFLINE is False
    with hub_errors("bundled", is_local=True):
        assert constants.HF_HUB_OFFLINE is False
    assert probed == [hub]


def test_messages_explain_why_the_hub_was_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"Cannot load a/b: .*, and HF_HUB_OFFLINE is set; expected"):
        load_config("a/b")
    with (
        pytest.raises(OSError, match=r"Cannot load small: It is not installed, and it is neither"),
        hub_errors("small", fix="It is not installed, and {why}"),
    ):
        raise LocalEntryNotFoundError("no connection")
    response = httpx.Response(404, request=httpx.Request("GET", "http://hub"))
    monkeypatch.setattr("blockattn_rag.hub._responds", lambda _: True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(OSError, match=r"a/b: Not found; .* need `hf auth"), hub_errors("a/b"):
        raise RepositoryNotFoundError("Not found.\nA web page.", response=response)


def test_other_errors_stay_unchanged() -> None:
    with pytest.raises(ValueError, match=r"^damaged$"), hub_errors("bundled", is_local=True):
        raise ValueError("damaged")
