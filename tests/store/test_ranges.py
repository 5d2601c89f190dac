"""Parts of entries from a directory and from buckets."""

from __future__ import annotations

import os
import threading
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
from blockattn_rag.store.header import FormatError, Header, header_end, parse_header
from tests.store.kvs import FLOATS, kvs, make_kv, quantised_kvs, same

obstore = pytest.importorskip("obstore.store")

KV = make_kv(tokens=40, heads=4)
KEY = KV.key
HEAD_BYTES = 8 << 10


class Asked:
    """A backend that records the ranges that are asked of it, and may hold answers back."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.ranges: list[tuple[str, int, int]] = []
        self.together: threading.Barrier | None = None

    def get(self, path: str, *, options: Any) -> Any:
        self.ranges.append((path, *options["range"]))
        if self.together is not None:
            self.together.wait(10)
        return self.backend.get(path, options=options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return DirectoryStore(tmp_path / "kv").path


@pytest.fixture
def backend(folder: Path) -> Asked:
    return Asked(obstore.LocalStore(folder))


@pytest.fixture(params=["directory", "objects"])
def store(request: pytest.FixtureRequest, folder: Path, backend: Asked) -> MaintainedStore:
    """Both over one folder, so that a test can damage its files."""
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
def test_what_is_read_is_the_part_of_the_entry(
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


def test_bad_entries_do_not_hide_others(store: MaintainedStore, folder: Path) -> None:
    other, short = make_kv("other", tokens=40), make_kv("cut", tokens=40)
    for kv in (KV, other, short):
        store.put(kv.key, kv)
    content = bytearray(file_of(folder).read_bytes())
    content[100] ^= 1
    file_of(folder).write_bytes(content)
    file_of(folder, short.key).write_bytes(file_of(folder, short.key).read_bytes()[:-1])
    asked = [KEY, other.key, "0" * 64, short.key]
    damaged, sound, absent, truncated = store.read_parts(asked, head_1, HEAD_BYTES)
    assert isinstance(damaged, CorruptEntryError)
    assert isinstance(truncated, CorruptEntryError)
    assert isinstance(sound, BlockKV)
    assert sound.key == other.key
    assert absent is None


def test_an_entry_of_an_earlier_version_is_absent(store: MaintainedStore, folder: Path) -> None:
    store.put(KEY, KV)
    old = file_of(folder).read_bytes().replace(b'"version":"3"', b'"version":"2"')
    file_of(folder).write_bytes(old)
    assert read(store) is None


def test_another_entry_under_the_key_is_reported(store: MaintainedStore, folder: Path) -> None:
    store.put(KEY, KV)
    other = file_of(folder, "0" * 64)
    other.parent.mkdir()
    other.write_bytes(file_of(folder).read_bytes())
    assert isinstance(read(store, "0" * 64), FingerprintMismatchError)


def test_a_choice_may_refuse_one_entry_for_its_header(store: MaintainedStore) -> None:
    other = make_kv("other", tokens=41)
    for kv in (KV, other):
        store.put(kv.key, kv)

    def only_40(header: Header) -> dict[int, range]:
        if header.num_tokens != 40:
            raise StoreError("found another length")
        return whole(header)

    sound, refused = store.read_parts([KEY, other.key], only_40, HEAD_BYTES)
    assert isinstance(sound, BlockKV)
    assert str(refused) == "found another length"


def test_a_file_that_is_cut_while_it_is_read_is_damaged(folder: Path) -> None:
    store = DirectoryStore(folder)
    store.put(KEY, KV)

    def cuts(header: Header) -> dict[int, range]:
        file_of(folder).write_bytes(file_of(folder).read_bytes()[:-1])
        return whole(header)

    found = read(store, choose=cuts)
    assert isinstance(found, CorruptEntryError)
    assert "it ends at byte" in str(found)


def test_reading_a_part_is_a_use_of_the_entry(folder: Path) -> None:
    store = DirectoryStore(folder)
    store.put(KEY, KV)
    os.utime(file_of(folder), (1, 1))
    read(store)
    assert file_of(folder).stat().st_mtime > 2


# -- buckets ---------------------------------------------------------------------------------------


def objects(backend: Asked, **options: Any) -> ObjectStore:
    return ObjectStore("file:///kv", backend=backend, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("head", [0, 1])
def test_what_was_read_with_the_header_is_not_read_again(backend: Asked, head: int) -> None:
    store = objects(backend)
    kv = make_kv(tokens=400, heads=4)
    store.put(kv.key, kv)
    layers = {0: range(head, head + 1), 1: range(head, head + 1)}
    assert same(read(store, kv.key, lambda _: layers), cut(kv, layers))
    first, *rest = [asked[1:] for asked in backend.ranges]
    assert (first, len(rest)) == ((0, HEAD_BYTES), 1)
    assert (rest[0][0] == HEAD_BYTES) == (head == 0)


def test_all_entries_are_asked_for_at_once(backend: Asked) -> None:
    store = objects(backend, parallel=4)
    kvs = [make_kv(f"passage {n}", tokens=300) for n in range(4)]
    for kv in kvs:
        store.put(kv.key, kv)
    backend.together = threading.Barrier(4)  # which lets none go before all four are there
    found = store.read_parts([kv.key for kv in kvs], whole, 4 << 10)
    assert all(isinstance(one, BlockKV) for one in found), found


def test_a_header_that_is_longer_than_what_is_read_is_not_of_this_model(backend: Asked) -> None:
    store = objects(backend)
    store.put(KEY, KV)
    (found,) = store.read_parts([KEY], head_1, 100)
    assert isinstance(found, FingerprintMismatchError)
    assert "expected at most 100" in str(found)


def test_parts_of_two_versions_are_not_joined(backend: Asked) -> None:
    store = objects(backend)
    store.put(KEY, make_kv(tokens=400, heads=4))

    def replaced(header: Header) -> dict[int, range]:
        store.put(KEY, make_kv(tokens=401, heads=4))
        return whole(header)

    found = read(store, choose=replaced)
    assert isinstance(found, StoreError), found


# -- decoding --------------------------------------------------------------------------------------


def part_of(kv: BlockKV, layers: Mapping[int, range]) -> tuple[Any, ...]:
    """Header, part, and bytes of the part, for ``decode_part``."""
    content = encode(kv)
    header = parse_header(content[: header_end(content)], len(content))
    taken = b"".join(content[start:stop] for start, stop in ranges(header, layers))
    return header, layers, torch.tensor(list(taken), dtype=torch.uint8)


@given(kvs(FLOATS) | quantised_kvs(), st.data())
def test_part_has_the_chosen_heads_and_layers(kv: BlockKV, data: st.DataObject) -> None:
    layers = sorted(data.draw(st.sets(st.integers(0, kv.num_layers - 1), min_size=1)))
    least = min(keys.shape[0] for keys in kv.keys)
    start = data.draw(st.integers(0, least - 1))
    part = dict.fromkeys(layers, range(start, data.draw(st.integers(start + 1, least))))
    assert same(decode_part(*part_of(kv, part)), cut(kv, part))


@pytest.mark.parametrize("quantised", [False, True])
def test_each_damaged_bit_of_a_part_is_found(quantised: bool) -> None:
    kv = make_kv(tokens=2, head_dim=3, quantised=quantised)
    header, part, content = part_of(kv, {0: range(1, 2)})
    for byte in range(len(content)):
        damaged = content.clone()
        damaged[byte] ^= 1 << byte % 8
        with pytest.raises(FormatError, match="damaged"):
            decode_part(header, part, damaged)


@pytest.mark.parametrize("quantised", [False, True])
def test_part_with_infinity_is_refused(quantised: bool) -> None:
    kv = make_kv(quantised=quantised)
    spoilt = kv.scales.values[1] if kv.scales else kv.values[1]
    spoilt[1, 0, 0] = float("inf")
    assert decode_part(*part_of(kv, {0: range(1), 1: range(1)})).num_layers == 2
    with pytest.raises(FormatError, match="NaN or infinity"):
        decode_part(*part_of(kv, {0: range(1, 2), 1: range(1, 2)}))


def test_heads_are_not_copied_and_some_layers_keep_no_others_in_memory() -> None:
    block = make_kv(layers=3, heads=4)
    header, part, content = part_of(block, dict.fromkeys(range(3), range(1, 3)))
    kv = decode_part(header, part, content)
    memory = content.untyped_storage().data_ptr()
    assert {keys.untyped_storage().data_ptr() for keys in (*kv.keys, *kv.values)} == {memory}
    some = decode_part(*part_of(block, dict.fromkeys(range(2), range(1, 3))))
    assert [keys.untyped_storage().nbytes() for keys in some.keys] == [k.nbytes for k in some.keys]
