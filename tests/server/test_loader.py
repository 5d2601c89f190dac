"""BlockLoader loads all blocks of a prompt before a deadline, or reports which failed and why."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from blockattn_rag.errors import CorruptEntryError, LoadError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.prompts.blocks import IN_MEMORY, PRIVATE, STORED
from blockattn_rag.server import loader as loading
from blockattn_rag.server.keys import BlockId, block_keys
from blockattn_rag.server.loader import BlockLoader
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.shares import Share, open_share
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore, TieredStore
from blockattn_rag.store.base import ReadResult
from tests.holding import LONGEST_S
from tests.server.profiles import make_profile
from tests.store.conftest import flip_bit
from tests.store.kvs import make_kv, same

PROFILE = make_profile(vocab_size=1000)
WHOLE = Share.of(PROFILE)
PROMPT = [1, 2, 3, 4, 5, 4, 5, 9]
PLAN = BlockPlan("complete", (3, 2, 2), "tenant", (STORED,) * 3)
BLOCKS = block_keys(PROMPT, PLAN, PROFILE, ["shared"])


S = TypeVar("S", bound=KVStore)


def kv_of(block: BlockId, namespace: str = "tenant") -> BlockKV:
    """Return the KV that an engine would store for a block."""
    kv = make_kv(str(block.ids), tokens=len(block.ids))
    return replace(kv, token_ids=torch.tensor(block.ids), digest=block.digest, namespace=namespace)


def filled(store: S, *namespaces: str) -> S:
    for block in BLOCKS:
        for namespace in namespaces or ("tenant",):
            kv = kv_of(block, namespace)
            store.put(kv.key, kv)
    return store


class Scripted(MemoryStore):
    """Store with scripted answers, which are held back until ``go`` is set."""

    def __init__(self, answer: Callable[[str], ReadResult] | None = None) -> None:
        super().__init__(1 << 24)
        self.answer = answer or super().get
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.asked: list[list[str]] = []

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        self.asked.append([*keys])
        self.begun.set()
        assert self.go.wait(LONGEST_S)
        return [self.answer(key) for key in keys]


class Loader(BlockLoader):
    """Loader with a list of its counts."""

    def __init__(
        self,
        store: KVStore,
        share: Share = WHOLE,
        kept: KVStore | None = None,
        deadline_s: float = LONGEST_S,
    ) -> None:
        self.counts: list[tuple[str, float]] = []
        super().__init__(
            store, share.token_outline(PROFILE), kept or MemoryStore(1),
            lambda *count: self.counts.append(count), deadline_s,
        )  # fmt: skip

    def counted(self, name: str) -> float:
        return sum(more for counter, more in self.counts if counter == name)


Make = Callable[..., Loader]


@pytest.fixture
def loader() -> Iterator[Make]:
    """Function that creates loaders, which are closed after the test."""
    with ExitStack() as stack:
        yield lambda *options, **more: stack.enter_context(closing(Loader(*options, **more)))


def failure(loader: BlockLoader, blocks: Sequence[BlockId] = BLOCKS) -> LoadError:
    with pytest.raises(LoadError) as caught:
        loader.start(blocks).result(2 * LONGEST_S)
    return caught.value


def counts_of(loader: Loader) -> tuple[float, ...]:
    return tuple(map(loader.counted, ("loads", "load_failures", "load_misses")))


# -- loading ---------------------------------------------------------------------------------------


def test_blocks_are_returned_in_order_by_one_read(loader: Make) -> None:
    store = filled(Scripted())
    one = loader(store)
    found = one.start(BLOCKS).result()
    assert all(same(kv, kv_of(block)) for kv, block in zip(found, BLOCKS, strict=True))
    assert store.asked == [[BLOCKS[0].key, BLOCKS[1].key]], (
        "expected the repeated block to be read once"
    )
    assert counts_of(one) == (1, 0, 0)
    assert one.counted("loaded_blocks") == 3
    assert one.counted("loaded_bytes") == sum(kv.nbytes for kv in found)
    assert one.counted("load_seconds") > 0


def test_a_prompt_without_blocks_needs_no_read(loader: Make) -> None:
    store = Scripted()
    assert loader(store).start([]).result() == []
    assert store.asked == []


def test_a_rank_loads_its_share_through_its_tiers(loader: Make, tmp_path: Path) -> None:
    home = filled(DirectoryStore(tmp_path / "kv"))
    share = Share.of(PROFILE, 1, 2)
    tiers = TieredStore("memory:1MiB", open_share(home, share, PROFILE))
    one = loader(tiers, share)
    for _ in range(2):
        found = one.start(BLOCKS).result()
        assert all(same(kv, share.cut(kv_of(b))) for kv, b in zip(found, BLOCKS, strict=True))
    memory, far = tiers.tier_stats()
    assert (memory.hits, far.hits) == (2, 2)
    assert far.read_bytes == sum(kv.nbytes for kv in found[:2])


def test_missing_blocks_are_read_from_the_shared_namespace(loader: Make) -> None:
    store = filled(Scripted(), "shared")
    own = kv_of(BLOCKS[0])
    store.put(own.key, own)
    found = loader(store).start(BLOCKS).result()
    assert [kv.namespace for kv in found] == ["tenant", "shared", "shared"]
    assert store.asked == [[BLOCKS[0].keys[0], BLOCKS[1].keys[0]], [BLOCKS[1].keys[1]]]


def test_a_quantized_block_is_accepted(loader: Make) -> None:
    store = MemoryStore(1 << 20)
    kv = kv_of(BLOCKS[0]).quantized()
    store.put(kv.key, kv)
    (found,) = loader(store).start(BLOCKS[:1]).result()
    assert found.scales is not None


# -- what may not be stored ---------------------------------------------------------------------

KEPT = block_keys(
    PROMPT, BlockPlan("complete", (3, 2, 2), "tenant", (IN_MEMORY, PRIVATE, STORED)), PROFILE
)


def test_private_blocks_come_from_memory_only(loader: Make) -> None:
    store, kept = Scripted(), MemoryStore(1 << 20)
    for block in KEPT:
        kv = kv_of(block, block.namespaces[0])
        (store if block.keep == STORED else kept).put(kv.key, kv)
    found = loader(store, kept=kept).start(KEPT).result()
    assert [kv.namespace for kv in found] == ["tenant", "tenant/private", "tenant"]
    assert store.asked == [[KEPT[2].key]]


def test_evicted_private_blocks_are_missing(loader: Make) -> None:
    store = filled(MemoryStore(1 << 20))
    one = loader(store, kept=MemoryStore(1 << 20))
    error = failure(one, KEPT)
    assert error.blocks == (1,)
    assert "nor in memory (private_memory)" in str(error)
    private = kv_of(KEPT[1], "tenant/private")
    store.put(private.key, private)  # as if encoded explicitly
    assert len(one.start(KEPT).result()) == 3


def test_blocks_in_memory_are_checked_like_stored_ones(loader: Make) -> None:
    kept = MemoryStore(1 << 20)
    kv = other_shape(kv_of(KEPT[1], "tenant/private"))
    kept.put(kv.key, kv)
    one = loader(filled(MemoryStore(1 << 20)), kept=kept)
    assert failure(one, KEPT).blocks == (1,)


def test_storable_blocks_are_read_from_memory_first(loader: Make) -> None:
    store = Scripted()
    assert len(loader(store, kept=filled(MemoryStore(1 << 20))).start(BLOCKS).result()) == 3
    assert store.asked == []


# -- what cannot be loaded -------------------------------------------------------------------------


def test_the_error_for_a_missing_block_names_its_index(loader: Make) -> None:
    store = filled(MemoryStore(1 << 20))
    store.delete(BLOCKS[1].key)
    one = loader(store)
    error = failure(one)
    assert str(error) == (
        "Block 1 of the prompt (2 tokens from index 3) and 1 more cannot be loaded: not found in "
        "any reachable store"
    )
    assert (error.blocks, error.damaged) == ((1, 2), ())
    assert counts_of(one) == (0, 1, 2)
    assert "Block 0 of the prompt (3 tokens from index 0) cannot" in str(
        failure(loader(MemoryStore(1)), BLOCKS[:1])
    )


def other_tokens(kv: BlockKV) -> BlockKV:
    return replace(kv, token_ids=kv.token_ids + 1)


def other_shape(kv: BlockKV) -> BlockKV:
    return Share.of(PROFILE, 0, 2).cut(kv)


def other_dtype(kv: BlockKV) -> BlockKV:
    return kv.with_tensors([[t.half() for t in kv.tensors(layer)] for layer in range(2)])


def other_digest(kv: BlockKV) -> BlockKV:
    return replace(kv, digest="0" * 64)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (other_tokens, "keys and values of other tokens"),
        (other_shape, "this model's shape or dtype"),
        (other_dtype, "this model's shape or dtype"),
        (other_digest, "contains another block"),
    ],
)
def test_blocks_of_other_models_or_shapes_are_refused(
    loader: Make, changed: Callable[[BlockKV], BlockKV], why: str
) -> None:
    bad = changed(kv_of(BLOCKS[1]))
    sound = filled(MemoryStore(1 << 20))
    store = Scripted(lambda key: bad if key == BLOCKS[1].key else sound.get(key))
    error = failure(loader(store))
    assert why in str(error)
    assert (error.blocks, error.damaged) == ((1, 2), (BLOCKS[1].key,))


def test_damaged_entry_is_reported_by_key(loader: Make, tmp_path: Path) -> None:
    home = filled(DirectoryStore(tmp_path / "kv"))
    flip_bit(home.entry_path(BLOCKS[0].key))
    one = loader(TieredStore("memory:1MiB", home))
    error = failure(one)
    assert "is damaged" in str(error)
    assert (error.blocks, error.damaged) == ((0,), (BLOCKS[0].key,))
    kv = kv_of(BLOCKS[0])
    home.put(kv.key, kv)
    assert len(one.start(BLOCKS).result()) == 3


def test_a_shared_entry_replaces_a_damaged_one(loader: Make) -> None:
    shared = filled(MemoryStore(1 << 20), "shared")
    own = {block.key for block in BLOCKS}
    store = Scripted(lambda key: CorruptEntryError("bad") if key in own else shared.get(key))
    assert len(loader(store).start(BLOCKS).result()) == 3


@pytest.mark.parametrize("error", [StoreError("the disk is away"), RuntimeError("a mistake")])
def test_unexpected_errors_fail_the_load(
    loader: Make, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    sound = filled(MemoryStore(1 << 20))
    errors: list[Exception] = [error]

    def fails_once(key: str) -> ReadResult:
        if errors:
            raise errors.pop()
        return sound.get(key)

    one = loader(Scripted(fails_once))
    with caplog.at_level(logging.ERROR, "blockattn_rag"):
        found = failure(one)
    assert str(error) in str(found)
    assert (found.blocks, found.damaged) == ((0, 1, 2), ())
    assert found.__cause__ is error
    assert len(caplog.records) == isinstance(error, RuntimeError)
    assert len(one.start(BLOCKS).result()) == 3
    assert counts_of(one) == (1, 1, 0)


# -- deadlines and limits --------------------------------------------------------------------------


def test_loads_of_a_hanging_store_time_out(loader: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_THREADS", 2)
    store = filled(Scripted())
    store.go.clear()
    one = loader(store, deadline_s=0.2)
    loads = [one.start(BLOCKS) for _ in range(6)]
    errors = [load.exception(LONGEST_S) for load in loads]
    assert all(isinstance(error, LoadError) for error in errors)
    assert all("deadline" in str(error) for error in errors)
    assert counts_of(one) == (0, 6, 0)
    store.go.set()
    assert len(store.asked) <= 2, "expected no read without a waiting load"
    one._deadline_s = LONGEST_S
    assert len(one.start(BLOCKS).result()) == 3


def test_loads_beyond_the_limit_fail_at_once(loader: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_MOST_WAITING", 2)
    store = filled(Scripted())
    store.go.clear()
    one = loader(store)
    taken = [one.start(BLOCKS) for _ in range(2)]
    refused = one.start(BLOCKS)
    assert refused.done()
    assert "2 loads are running or waiting" in str(refused.exception())
    store.go.set()
    assert [len(load.result()) for load in taken] == [3, 3]
    assert len(one.start(BLOCKS).result()) == 3
    assert counts_of(one) == (3, 1, 0)


def test_closing_a_loader_ends_running_loads_and_refuses_new_ones(
    loader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_THREADS", 1)
    store = filled(Scripted())
    store.go.clear()
    one = loader(store)
    going, waiting = one.start(BLOCKS), one.start(BLOCKS)
    assert store.begun.wait(LONGEST_S)
    one.close()
    assert waiting.cancelled()
    assert "the loader is closed" in str(failure(one))
    store.go.set()
    assert len(going.result()) == 3
