"""Shares: together, ranks read complete blocks, bit for bit, with all checksums verified."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.rope import NO_ROTATION
from blockattn_rag.server.profile import LayerProfile, ModelProfile
from blockattn_rag.server.shares import Share, ShareStore, open_share
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore, ObjectStore, TieredStore
from tests.server.profiles import make_profile
from tests.store.conftest import Asked, flip_bit
from tests.store.kvs import FLOATS, kvs, make_kv, same


def profile_of_block(kv: BlockKV) -> ModelProfile:
    """Return the profile of a model that computes blocks like this one."""
    return ModelProfile(
        fingerprint="f" * 64,
        tokenizer="e" * 64,
        name="made-up",
        dtype=kv.token_outline[0][2],
        layers=tuple(
            LayerProfile(keys.shape[0], keys.shape[2], values.shape[2], NO_ROTATION, index)
            for index, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True))
        ),
        recipe=RecipeOutline("none"),
        hidden_layers=kv.num_layers,
        vocab_size=1 << 40,
        max_positions=1 << 20,
    )


def put_together(whole: BlockKV, parts: Sequence[tuple[Share, BlockKV]]) -> BlockKV:
    """Combine the parts of all ranks. Heads that several ranks have come from the last one."""
    layers: list[list[Tensor]] = [
        [torch.zeros_like(t) for t in whole.tensors(layer)] for layer in range(whole.num_layers)
    ]
    for share, kv in parts:
        for place, (layer, heads) in enumerate(zip(share.layers, share.heads, strict=True)):
            for into, tensor in zip(layers[layer], kv.tensors(place), strict=True):
                into[heads.start : heads.stop] = tensor
    assert all(kv.token_ids.tolist() == whole.token_ids.tolist() for _, kv in parts)
    return parts[0][1].with_tensors(layers)


def shares_of(profile: ModelProfile, ranks: int, stages: int) -> list[Share]:
    """Return the share of each tensor-parallel rank of each pipeline stage."""
    count = len(profile.layers)
    cuts = [stage * count // stages for stage in range(stages + 1)]
    return [
        Share.of(profile, rank, ranks, range(start, stop))
        for start, stop in itertools.pairwise(cuts)
        if start < stop
        for rank in range(ranks)
    ]


def home_of(kind: str, folder: Path) -> KVStore:
    """Return a directory, the same directory as an object store, or memory."""
    directory = DirectoryStore(folder)
    if kind == "objects":
        obstore = pytest.importorskip("obstore.store")
        return ObjectStore("file:///kv", backend=obstore.LocalStore(directory.path))
    return directory if kind == "directory" else MemoryStore(1 << 30)


HOMES = ["directory", "objects", "memory"]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KVStore]:
    return {kind: home_of(kind, tmp_path_factory.mktemp(kind)) for kind in HOMES}


# -- assignment of shares --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (8, 1, [range(8)]),
        (8, 4, [range(2), range(2, 4), range(4, 6), range(6, 8)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 2, [range(1), range(1)]),
    ],
)
def test_heads_are_split_as_in_engines(heads: int, ranks: int, expected: list[range]) -> None:
    profile = make_profile(heads=(heads, heads))
    found = [Share.of(profile, rank, ranks) for rank in range(ranks)]
    assert [share.heads for share in found] == [(own, own) for own in expected]
    whole = Share.of(profile)
    assert [share == whole for share in found] == [heads == 1 or ranks == 1] * ranks


def test_layers_with_different_numbers_of_heads_are_split_individually() -> None:
    profile = make_profile(heads=(4, 2, 1))
    assert Share.of(profile, 1, 2).heads == (range(2, 4), range(1, 2), range(1))
    assert Share.of(profile, 1, 2, range(1, 3)) == Share(range(1, 3), (range(1, 2), range(1)))


def test_different_shares_have_different_names() -> None:
    even, odd = make_profile(heads=(4, 4)), make_profile(heads=(4, 2))
    shares = [
        Share.of(profile, rank, ranks, layers)
        for profile, ranks in ((even, 2), (even, 4), (odd, 2))
        for rank in range(ranks)
        for layers in (range(1), range(2))
    ]
    assert len({share.name for share in shares}) == len(set(shares))
    assert shares[1].name == "layers-0-2-heads-0-2"


def test_invalid_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Share.of(make_profile(), 2, 2)


# -- reading ---------------------------------------------------------------------------------------


@given(
    kvs(FLOATS[:3]).flatmap(lambda kv: st.sampled_from([kv, kv.quantized()])),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 2, 3]),
)
@settings(max_examples=40)
def test_all_ranks_together_read_complete_blocks(
    homes: dict[str, KVStore], kv: BlockKV, ranks: int, stages: int
) -> None:
    profile = profile_of_block(kv)
    for home in homes.values():
        home.put(kv.key, kv)
        parts = []
        for share in shares_of(profile, ranks, stages):
            found = ShareStore(home, share, profile).get(kv.key)
            assert found is not None
            assert found.key == kv.key
            assert found.token_outline == share.token_outline(profile)
            parts.append((share, found))
        assert same(put_together(kv, parts), kv), home


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    return home_of(request.param, tmp_path / "kv")


PROFILE = make_profile()
KV = make_kv(tokens=40)
SECOND = Share.of(PROFILE, 1, 2)


def test_the_share_of_a_single_rank_is_the_store_itself(home: KVStore) -> None:
    assert open_share(home, Share.of(PROFILE), PROFILE) is home
    store = open_share(home, SECOND, PROFILE)
    assert isinstance(store, ShareStore)
    assert store.home is home


def test_shares_are_looked_up_like_entries_of_the_store(home: KVStore) -> None:
    store = ShareStore(home, SECOND, PROFILE)
    assert isinstance(store, KVStore)
    assert (store.get(KV.key), KV.key in store, store.touch(KV.key)) == (None, False, False)
    home.put(KV.key, KV)
    assert (KV.key in store, store.touch(KV.key), list(store.keys())) == (True, True, [KV.key])
    assert store.stats() == home.stats()


def test_share_stores_are_read_only(home: KVStore) -> None:
    home.put(KV.key, KV)
    store = ShareStore(home, SECOND, PROFILE)
    with pytest.raises(StoreError, match="which is read-only; use"):
        store.put(KV.key, KV)
    with pytest.raises(StoreError, match="which is read-only; use"):
        store.delete(KV.key)
    assert KV.key in home


def test_a_share_uses_no_more_memory_than_reported(home: KVStore) -> None:
    home.put(KV.key, KV)
    found = ShareStore(home, SECOND, PROFILE).get(KV.key)
    assert found is not None
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found.keys}
    kept |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found.values}
    ids = 8 * KV.num_tokens  # token ids are part of each share
    assert sum(kept.values()) <= found.nbytes + ids == KV.nbytes // 2 + ids


@pytest.mark.parametrize(
    "profile",
    [
        make_profile(heads=(2, 2, 2)),
        make_profile(heads=(4, 4)),
        make_profile(heads=(2, 4)),
        make_profile(value_size=8),
        make_profile(dtype=torch.bfloat16),
    ],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_other_shapes_are_refused(home: KVStore, profile: ModelProfile, quantized: bool) -> None:
    kv = make_kv(tokens=40, quantized=quantized)
    home.put(kv.key, kv)
    store = ShareStore(home, Share.of(profile, 1, 2), profile)
    with pytest.raises(FingerprintMismatchError, match="do not have the shapes or dtype"):
        store.get(kv.key)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("more_heads", [0, 1])
@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_a_share_is_read_with_two_requests(quantized: bool, more_heads: int, tokens: int) -> None:
    obstore = pytest.importorskip("obstore.store")
    kv = make_kv(layers=40, heads=8, tokens=tokens, more_heads=more_heads, quantized=quantized)
    profile = profile_of_block(kv)
    backend = Asked(obstore.MemoryStore())
    home = ObjectStore("memory://kv", backend=backend)  # type: ignore[arg-type]
    home.put(kv.key, kv)
    for rank in range(8):
        backend.ranges.clear()
        share = Share.of(profile, rank, 8)
        assert same(ShareStore(home, share, profile).get(kv.key), share.cut(kv))
        assert len(backend.ranges) <= (3 if quantized else 2)  # scales need another request


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "kv")


@pytest.fixture(params=HOMES[:2])
def ranges(request: pytest.FixtureRequest, folder: DirectoryStore) -> KVStore:
    return home_of(request.param, folder.path)


@pytest.mark.parametrize("quantized", [False, True])
def test_damage_is_reported_by_the_rank_that_reads_it(
    ranges: KVStore, folder: DirectoryStore, quantized: bool
) -> None:
    kv, other = (make_kv(name, tokens=40, quantized=quantized) for name in ("one", "other"))
    for one in (kv, other):
        ranges.put(one.key, one)
    flip_bit(folder.entry_path(kv.key))  # damages the values of the last head
    first, second = (ShareStore(ranges, Share.of(PROFILE, rank, 2), PROFILE) for rank in (0, 1))
    damaged, sound = second.get_many([kv.key, other.key])
    assert isinstance(damaged, CorruptEntryError)
    assert "its head.0001.values.00 is damaged" in str(damaged)
    assert kv.key in str(damaged)
    assert isinstance(sound, BlockKV)
    assert first.get(kv.key) is not None
    with pytest.raises(CorruptEntryError):
        second.get(kv.key)


def test_every_rank_finds_damaged_ids(ranges: KVStore, folder: DirectoryStore) -> None:
    ranges.put(KV.key, KV)
    start = folder.entry_path(KV.key).stat().st_size - KV.nbytes - 8 * KV.num_tokens
    flip_bit(folder.entry_path(KV.key), start)
    for rank in (0, 1):
        with pytest.raises(CorruptEntryError, match="its token_ids is damaged"):
            ShareStore(ranges, Share.of(PROFILE, rank, 2), PROFILE).get(KV.key)


# -- tiers -----------------------------------------------------------------------------------------


def test_a_rank_caches_its_share_and_reads_the_store_once(home: KVStore, tmp_path: Path) -> None:
    home.put(KV.key, KV)
    local = DirectoryStore(tmp_path / "rank-1-of-2")
    tiers = TieredStore("memory:1MiB", local, ShareStore(home, SECOND, PROFILE))
    expected = SECOND.cut(KV)
    for _ in range(2):
        [found] = tiers.get_many([KV.key])
        assert same(found, expected)
        tiers.flush()  # pending writes would otherwise answer reads
    [memory, disk, far] = tiers.tier_stats()
    assert (memory.hits, disk.hits, far.hits) == (1, 0, 1)
    assert (disk.written, far.written) == (1, 0)
    again = TieredStore("memory:1MiB", local, ShareStore(MemoryStore(1), SECOND, PROFILE))
    assert same(again.get(KV.key), expected)
