"""Damaged and foreign entries in every store that keeps entries outside of the process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import KVStore, MaintainedStore
from blockattn_rag.store.format import encode
from tests.store.conftest import Raw
from tests.store.kvs import make_kv, same

KV, OTHER = make_kv(tokens=40), make_kv("other")
KEY = KV.key


@pytest.mark.parametrize("end", [0, 5, 100, -1])
def test_truncated_entry_is_damaged_until_put(encoded: Raw[KVStore], end: int) -> None:
    store = encoded.store
    encoded.write(KEY, encode(KV)[:end])
    reads: list[Callable[[str], object]] = [store.get]
    if isinstance(store, MaintainedStore):
        assert not store.touch(KEY)
        reads += [store.peek, store.describe]
    for read in reads:
        with pytest.raises(CorruptEntryError, match=f"{KEY}.* is damaged: "):
            read(KEY)
    store.put(KEY, KV)
    assert store.touch(KEY)
    assert same(store.get(KEY), KV)


def test_get_many_reports_errors_per_entry(encoded: Raw[KVStore]) -> None:
    for kv in (KV, OTHER):
        encoded.store.put(kv.key, kv)
    encoded.flip_last_bit(KEY)
    damaged, absent, sound = encoded.store.get_many([KEY, "0" * 64, OTHER.key])
    assert isinstance(damaged, CorruptEntryError)
    assert absent is None
    assert same(sound, OTHER)


@pytest.mark.parametrize("other", [OTHER, make_kv(fingerprint="other model")])
def test_foreign_entry_is_refused(encoded: Raw[KVStore], other: BlockKV) -> None:
    store = encoded.store
    store.put(other.key, other)
    encoded.write(KEY, encoded.read(other.key))
    with pytest.raises(FingerprintMismatchError, match=f"{KEY}.* another .* key is {other.key}"):
        store.get(KEY)
    if isinstance(store, MaintainedStore):
        with pytest.raises(FingerprintMismatchError):
            store.describe(KEY)
        assert not store.touch(KEY)
        assert not store.claim(KEY, ["a" * 32])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_put_refuses_nan_and_infinity(encoded: Raw[KVStore], value: float) -> None:
    kv = make_kv()
    kv.values[1][0, 0, 0] = value
    with pytest.raises(StoreError, match=r"Cannot write .*NaN or infinity\. The model may"):
        encoded.store.put(kv.key, kv)
    assert list(encoded.store.keys()) == []


def test_malformed_key_is_refused(encoded: Raw[KVStore]) -> None:
    with pytest.raises(ValueError, match="64 lowercase hex digits"):
        encoded.store.get("../../etc/passwd")
    assert "../../etc/passwd" not in encoded.store


def test_describe_returns_the_header(maintained: Raw[MaintainedStore]) -> None:
    store = maintained.store
    store.put(KEY, KV)
    before = time.time()
    info = store.describe(KEY)
    assert info is not None
    header = info.header
    assert (header.key, header.handle, header.digest) == (KEY, KV.handle, KV.digest)
    assert (header.fingerprint, header.num_tokens) == (KV.fingerprint, KV.num_tokens)
    (entry,) = store.entries()
    assert (entry.key, entry.nbytes) == (KEY, info.nbytes)
    assert info.nbytes == len(maintained.read(KEY))
    assert abs(info.used_ns / 1e9 - before) < 60
    assert info.age_s < 60
    assert store.describe(OTHER.key) is None


def test_discard_keeps_entries_that_were_used(maintained: Raw[MaintainedStore]) -> None:
    store = maintained.store
    store.put(KEY, KV)
    (entry,) = store.entries()
    assert store.discard(KEY, entry.used_ns - 2 * 10**9) is False
    assert KEY in store
    assert store.discard(KEY, entry.used_ns)
    assert store.discard(KEY, entry.used_ns) is None


def test_read_blocks_do_not_change(encoded: Raw[KVStore]) -> None:
    encoded.store.put(KEY, KV)
    held = encoded.store.get(KEY)
    assert held is not None
    held.keys[0].fill_(0)
    again = encoded.store.get(KEY)
    new = make_kv(dtype=torch.float16)
    encoded.store.put(KEY, new)
    assert same(again, KV)
    encoded.store.delete(KEY)
    assert same(again, KV)
