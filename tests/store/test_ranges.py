"""Parts of entries from a directory and from buckets, in two requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, EntryPart, MaintainedStore, ObjectStore
from blockattn_rag.store.format import decode_part, encode
from blockattn_rag.store.header import FormatError, Header, header_end, parse_header
from blockattn_rag.store.layout import ByteRange, ranges
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


def head_1(header: Header) -> list[ByteRange]:
    return [header.layout.place("token_ids"), *ranges(header.layout.pieces(heads=[1]))]


def whole(header: Header) -> list[ByteRange]:
    return [ByteRange(0, header.nbytes)]


def nothing(_header: Header) -> list[ByteRange]:
    return []


def read(store: MaintainedStore, key: str = KEY, wanted: Any = head_1) -> Any:
    (found,) = store.read_ranges([key], wanted, HEAD_BYTES)
    return found


@pytest.mark.parametrize("wanted", [head_1, whole, nothing])
@pytest.mark.parametrize("part_bytes", [64, 1 << 20])
def test_what_is_read_are_the_bytes_of_the_entry(
    store: MaintainedStore,
    folder: Path,
    backend: Asked,
    wanted: Any,
    part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blockattn_rag.store.object_client._PART_BYTES", part_bytes)
    store.put(KEY, KV)
    content = file_of(folder).read_bytes()
    part = read(store, wanted=wanted)
    assert part.header == parse_header(content[: header_end(content)], len(content))
    assert part.places == wanted(part.header)
    expected = b"".join(content[start:stop] for start, stop in part.places)
    assert bytes(part.data.tolist()) == expected
    assert KEY in part.source
    assert all(stop - start <= part_bytes for _, start, stop in backend.ranges[1:])


def test_bad_entries_do_not_hide_others(store: MaintainedStore, folder: Path) -> None:
    other, cut = make_kv("other", tokens=40), make_kv("cut", tokens=40)
    for kv in (KV, other, cut):
        store.put(kv.key, kv)
    content = bytearray(file_of(folder).read_bytes())
    content[100] ^= 1
    file_of(folder).write_bytes(content)
    file_of(folder, cut.key).write_bytes(file_of(folder, cut.key).read_bytes()[:-1])
    asked = [KEY, other.key, "0" * 64, cut.key]
    damaged, sound, absent, short = store.read_ranges(asked, head_1, HEAD_BYTES)
    assert isinstance(damaged, CorruptEntryError)
    assert isinstance(short, CorruptEntryError)
    assert isinstance(sound, EntryPart)
    assert sound.header.key == other.key
    assert absent is None


def test_another_entry_under_the_key_is_told(store: MaintainedStore, folder: Path) -> None:
    store.put(KEY, KV)
    other = file_of(folder, "0" * 64)
    other.parent.mkdir()
    other.write_bytes(file_of(folder).read_bytes())
    assert isinstance(read(store, "0" * 64), FingerprintMismatchError)


def test_who_chooses_may_refuse_one_entry_for_what_its_header_says(store: MaintainedStore) -> None:
    other = make_kv("other", tokens=41)
    for kv in (KV, other):
        store.put(kv.key, kv)

    def only_40(header: Header) -> Sequence[ByteRange]:
        if header.num_tokens != 40:
            raise StoreError("found another length")
        return whole(header)

    sound, refused = store.read_ranges([KEY, other.key], only_40, HEAD_BYTES)
    assert isinstance(sound, EntryPart)
    assert str(refused) == "found another length"


def test_a_file_that_is_cut_while_it_is_read_is_damaged(folder: Path) -> None:
    store = DirectoryStore(folder)
    store.put(KEY, KV)

    def cuts(header: Header) -> Sequence[ByteRange]:
        file_of(folder).write_bytes(file_of(folder).read_bytes()[:-1])
        return whole(header)

    found = read(store, wanted=cuts)
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

    def wanted(header: Header) -> Sequence[ByteRange]:
        return [header.layout.place("token_ids"), *ranges(header.layout.pieces(heads=[head]))]

    part = read(store, kv.key, wanted)
    ids, states = part.places
    assert ids.stop < HEAD_BYTES < states.stop
    assert (states.start < HEAD_BYTES) == (head == 0)
    found = [asked[1:] for asked in backend.ranges]
    assert found == [(0, HEAD_BYTES), (max(states.start, HEAD_BYTES), states.stop)]


def test_all_entries_are_asked_for_at_once(backend: Asked) -> None:
    store = objects(backend, parallel=4)
    kvs = [make_kv(f"passage {n}", tokens=300) for n in range(4)]
    for kv in kvs:
        store.put(kv.key, kv)
    backend.together = threading.Barrier(4)  # which lets none go before all four are there
    found = store.read_ranges([kv.key for kv in kvs], whole, 4 << 10)
    assert all(isinstance(one, EntryPart) for one in found), found


def test_a_header_that_is_longer_than_what_is_read_is_not_of_this_model(backend: Asked) -> None:
    store = objects(backend)
    store.put(KEY, KV)
    (found,) = store.read_ranges([KEY], head_1, 100)
    assert isinstance(found, FingerprintMismatchError)
    assert "expected at most 100" in str(found)


def test_parts_of_two_versions_are_not_joined(backend: Asked) -> None:
    store = objects(backend)
    store.put(KEY, make_kv(tokens=400, heads=4))

    def replaced(header: Header) -> Sequence[ByteRange]:
        store.put(KEY, make_kv(tokens=401, heads=4))
        return whole(header)

    found = read(store, wanted=replaced)
    assert isinstance(found, StoreError), found


# -- decoding --------------------------------------------------------------------------------------


def part_of(kv: BlockKV, heads: Sequence[int], layers: Sequence[int]) -> tuple[Any, ...]:
    """Header, pieces, places and bytes of some heads and layers, for ``decode_part``."""
    content = b"".join(encode(kv))
    header = parse_header(content[: header_end(content)], len(content))
    pieces = [*header.layout.pieces(heads, layers)]
    places = [header.layout.place("token_ids"), *ranges(pieces)]
    taken = b"".join(content[start:stop] for start, stop in places)
    return header, pieces, places, torch.tensor(list(taken), dtype=torch.uint8)


@given(kvs(FLOATS) | quantised_kvs(), st.data())
def test_part_has_the_chosen_heads_and_layers(kv: BlockKV, data: st.DataObject) -> None:
    layers = sorted(data.draw(st.sets(st.integers(0, kv.num_layers - 1), min_size=1)))
    least = min(keys.shape[0] for keys in kv.keys)
    heads = sorted(data.draw(st.sets(st.integers(0, least - 1), min_size=1)))
    expected = kv.with_tensors([[t[heads] for t in kv.tensors(layer)] for layer in layers])
    assert same(decode_part(*part_of(kv, heads, layers)), expected)


@pytest.mark.parametrize("quantised", [False, True])
def test_each_damaged_bit_of_a_part_is_found(quantised: bool) -> None:
    kv = make_kv(tokens=2, head_dim=3, quantised=quantised)
    header, pieces, places, content = part_of(kv, [1], [0])
    for byte in range(len(content)):
        damaged = content.clone()
        damaged[byte] ^= 1 << byte % 8
        with pytest.raises(FormatError, match="damaged"):
            decode_part(header, pieces, places, damaged)


@pytest.mark.parametrize("quantised", [False, True])
def test_part_with_infinity_is_refused(quantised: bool) -> None:
    kv = make_kv(quantised=quantised)
    spoilt = kv.scales.values[1] if kv.scales else kv.values[1]
    spoilt[1, 0, 0] = float("inf")
    sound = part_of(kv, [0], [0, 1])
    assert decode_part(*sound).num_layers == 2
    with pytest.raises(FormatError, match="NaN or infinity"):
        decode_part(*part_of(kv, [1], [0, 1]))


def test_a_part_of_one_range_is_not_copied() -> None:
    header, pieces, places, content = part_of(make_kv(layers=3, heads=4), [1, 2], [0, 1, 2])
    kv = decode_part(header, pieces, places, content)
    memory = content.untyped_storage().data_ptr()
    assert {keys.untyped_storage().data_ptr() for keys in (*kv.keys, *kv.values)} == {memory}
