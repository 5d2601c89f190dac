"""Opening stores, and what importing the package loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from blockattn_rag import store
from blockattn_rag.store import DirectoryStore, MemoryStore, TieredStore, open_store


def test_no_store_means_one_of_a_gibibyte_in_memory() -> None:
    opened = open_store(None)
    assert isinstance(opened, MemoryStore)
    assert opened.max_bytes == 2**30


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_means_a_store_on_disk(tmp_path: Path, kind: type[str] | type[Path]) -> None:
    opened = open_store(kind(tmp_path / "kv"))
    assert isinstance(opened, DirectoryStore)
    assert opened.path == tmp_path / "kv"


def test_a_cache_without_a_home_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("redis")
    open_store("redis://localhost:1/0")  # which is asked for nothing yet
    assert "is a cache: blocks that it evicts" in caplog.text
    caplog.clear()
    TieredStore("redis://localhost:1/0", "memory:").close()
    assert not caplog.text


def test_a_store_is_itself() -> None:
    memory = MemoryStore(1)
    assert open_store(memory) is memory


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match="a KVStore, a path, an address or None, found int"):
        open_store(3)  # type: ignore[arg-type]


def test_every_public_name_can_be_had() -> None:
    assert dir(store) == sorted(store.__all__)
    for name in store.__all__:
        assert getattr(store, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'FloppyStore'"):
        _ = store.FloppyStore


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, blockattn_rag.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
