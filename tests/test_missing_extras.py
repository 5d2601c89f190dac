"""The command that installs a missing extra depends on how the package was installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockattn_rag.lazy import missing_extra


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create metadata of an installed blockattn-rag that takes precedence over the real one."""
    folder = tmp_path / "blockattn_rag-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: blockattn-rag\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_a_package_from_an_index_names_the_index(installed: Path) -> None:
    text = missing_extra("redis", "redis")
    assert text == 'redis, which is not installed; run `pip install "blockattn-rag[redis]"`'


def test_a_package_from_a_folder_names_the_folder(installed: Path) -> None:
    (installed / "direct_url.json").write_text('{"url": "file:///clone", "dir_info": {}}')
    text = missing_extra("redis", "redis")
    assert '`pip install -c constraints.txt -e ".[redis]"` in the folder that' in text
