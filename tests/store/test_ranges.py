"""Reading parts of entries from directories and buckets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, MaintainedStore, ObjectStore
from blockattn_rag.store.format import decode_part, encode, ranges
from blockattn_rag.store.header import Header, header_end, parse_header
from tests.store.conftest import Asked, flip_bit
from tests.store.kvs import FLOATS, kvs, make_kv, quantized_kvs, same

obstore = pytest.importorskip("obstore.store")

KV = make_kv(tokens=40, heads=4)
KEY = KV.key
HEAD_BYTES = 8 << 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return DirectoryStore(tmp_path / "kv").path


@pytest.fixture
def backend(folder: Path) -> Asked:
    return Asked(obstore.LocalStore(folder))


@pytest.fixture(params=["directory", "objects"])
def store(request: pytest.FixtureRequest, folder: Path, backend: Asked) -> MaintainedStore:
    """Each kind of store over the same folder, so that tests can damage files."""
    if request.param == "directory":
        return DirectoryStore(folder)
    return ObjectStore("file:///kv", backend=backend, deadline_s=5)  # type: ignore[arg-type]


def file_of(folder: Path, key: str = KEY) -> Path:
    return DirectoryStore(folder).entry_path(key)


def head_1(header: Header) -> dict[int, range]:
    return dict.fromkeys(range(len(header.layout.layers)), range(1, 2))


def whole(header: Header) -> dict[int, range]:
    return {n: range(layer.heads) for n, layer in enumerate(header.layout.layers)}


def read(store: MaintainedStore, key: str = KEY, choose: Any = head_1) -> Any:
    (found,) = store.read_parts([key], choose, HEAD_BYTES)
    return found


def cut(kv: BlockKV, layers: Mapping[int, range]) -> BlockKV:
    parts = [[t[own.start : own.stop] for t in kv.tensors(n)] for n, own in layers.items()]
    return kv.with_tensors(parts)


@pytest.mark.parametrize("layers", [{0: range(1, 2), 1: range(1, 2)}, {1: range(4)}])
@pytest.mark.parametrize("part_bytes", [64, 1 << 20])
def test_read_parts_returns_the_chosen_heads(
    store: MaintainedStore,
    backend: Asked,
    layers: dict[int, range],
    part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blockattn_rag.store.object_client._PART_BYTES", part_bytes)
    store.put(KEY, KV)
    assert same(read(store, choose=lambda _: layers), cut(KV, layers))
    assert all(stop - start <= part_bytes for _, start, stop in backend.ranges[1:])


def test_read_parts_reports_errors_per_entry(store: MaintainedStore, folder: Path) -> None:
    other, short = make_kv("other", tokens=40), make_kv("cut", tokens=40)
    for kv in (KV, other, short):
        store.put(kv.key, kv)
    flip_bit(file_of(folder), 100)
    file_of(folder, short.key).write_bytes(file_of(folder, short.key).read_bytes()[:-1])
    asked = [KEY, other.key, "0" * 64, short.key]
    damaged, sound, absent, truncated = store.read_parts(asked, head_1, HEAD_BYTES)
    assert isinstance(damaged, CorruptEntryError)
    assert isinstance(truncated, CorruptEntryError)
    assert isinstance(sound, BlockKV)
    assert sound.key == other.key
    assert absent is None


def test_foreign_entry_is_reported(store: MaintainedStore, folder: Path) -> None:
    store.put(KEY, KV)
    other = file_of(folder, "0" * 64)
    other.parent.mkdir()
    other.write_bytes(file_of(folder).read_bytes())
    assert isinstance(read(store, "0" * 64), FingerprintMismatchError)


def test_file_truncated_during_the_read_is_damaged(folder: Path) -> None:
    store = DirectoryStore(folder)
    store.put(KEY, KV)

    def cuts(header: Header) -> dict[int, range]:
        file_of(folder).write_bytes(file_of(folder).read_bytes()[:-1])
        return whole(header)

    found = read(store, choose=cuts)
    assert isinstance(found, CorruptEntryError)
    assert "it ends at byte" in str(found)


def test_reading_a_part_counts_as_a_use(folder: Path) -> None:
    store = DirectoryStore(folder)
    store.put(KEY, KV)
    os.utime(file_of(folder), (1, 1))
    read(store)
    assert file_of(folder).stat().st_mtime > 2


# -- buckets ---------------------------------------------------------------------------------------


def objects(backend: Asked, **options: Any) -> ObjectStore:
    return ObjectStore("file:///kv", backend=backend, **options)  # type: ignore[arg-type]


def test_longer_header_belongs_to_another_model(backend: Asked) -> None:
    store = objects(backend)
    store.put(KEY, KV)
    (found,) = store.read_parts([KEY], head_1, 100)
    assert isinstance(found, FingerprintMismatchError)
    assert "at most 100 were expected" in str(found)


def test_parts_of_two_versions_are_not_mixed(backend: Asked) -> None:
    store = objects(backend)
    store.put(KEY, make_kv(tokens=400, heads=4))

    def replaced(header: Header) -> dict[int, range]:
        store.put(KEY, make_kv(tokens=401, heads=4))
        return whole(header)

    found = read(store, choose=replaced)
    assert isinstance(found, StoreError), found


# -- decoding --------------------------------------------------------------------------------------


def part_of(kv: BlockKV, layers: Mapping[int, range]) -> tuple[Any, ...]:
    """Return the arguments of ``decode_part``: header, part, and bytes of the part."""
    content = encode(kv)
    header = parse_header(content[: header_end(content)], len(content))
    taken = b"".join(content[start:stop] for start, stop in ranges(header, layers))
    return header, layers, torch.tensor(list(taken), dtype=torch.uint8)


@given(kvs(FLOATS) | quantized_kvs(), st.data())
def test_part_has_the_chosen_heads_and_layers(kv: BlockKV, data: st.DataObject) -> None:
    layers = sorted(data.draw(st.sets(st.integers(0, kv.num_layers - 1), min_size=1)))
    least = min(keys.shape[0] for keys in kv.keys)
    start = data.draw(st.integers(0, least - 1))
    part = dict.fromkeys(layers, range(start, data.draw(st.integers(start + 1, least))))
    assert same(decode_part(*part_of(kv, part)), cut(kv, part))


def test_decoded_part_keeps_no_other_layers_in_memory() -> None:
    block = make_kv(layers=3, heads=4)
    header, part, content = part_of(block, dict.fromkeys(range(3), range(1, 3)))
    kv = decode_part(header, part, content)
    memory = content.untyped_storage().data_ptr()
    assert {keys.untyped_storage().data_ptr() for keys in (*kv.keys, *kv.values)} == {memory}
    some = decode_part(*part_of(block, dict.fromkeys(range(2), range(1, 3))))
    assert [keys.untyped_storage().nbytes() for keys in some.keys] == [k.nbytes for k in some.keys]
