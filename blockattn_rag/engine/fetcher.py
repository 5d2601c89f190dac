"""Getting blocks' keys and values: from the store where they are, from the model where not."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from tqdm.auto import tqdm

from blockattn_rag.engine.transfer import to_device
from blockattn_rag.errors import MissError, StoreError
from blockattn_rag.kv.block_kv import BlockKV, store_key
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.prompts.blocks import Block, Origin
from blockattn_rag.store.base import touch
from blockattn_rag.store.memory import MemoryStore

if TYPE_CHECKING:
    from blockattn_rag.store import KVStore

logger = logging.getLogger("blockattn_rag")

OnMiss = Literal["compute", "error"]

# Blocks that `precompute` sorts by length together: bounds memory, keeps padding low.
_PRECOMPUTE_WINDOW = 256


@dataclass(frozen=True, slots=True)
class EncodeStats:
    """What ``precompute`` did, in distinct blocks. Texts of no tokens are in neither figure."""

    computed: int = 0
    reused: int = 0
    computed_tokens: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0


class Fetched(NamedTuple):
    """The KV of a prompt's context blocks, in order, and how it was come by.

    ``missed_tokens`` counts the tokens that had to be computed, each block once.
    """

    blocks: list[BlockKV]
    hits: int
    misses: int
    missed_tokens: int


# What a miss may write to a store; a block of any other origin is private to its prompt.
_STORABLE: frozenset[Origin] = frozenset({"passage"})

_MOST_TO_STORE = 4096
_TOUCH_EVERY_S = 60.0
_MOST_TOUCHED = 1 << 16


def _no_limit(tokens: int) -> None:
    """For contexts of any length."""


class _Wanted(NamedTuple):
    key: str
    digest: str
    block: Block
    first: bool


class BlockFetcher:
    """A model and a store, and the promise that what comes out is this model's KV of this text.

    Args:
        lock: held while the model computes.
        resident_bytes: keep as many bytes of blocks that were read from disk, or wherever the
            store has them, in memory of the model's device, the least recently used ones going
            first. They are checked when they are read, and not again. A ``MemoryStore`` holds
            blocks where they were computed, and needs none of this.
    """

    def __init__(
        self,
        model: BlockModel,
        store: KVStore,
        lock: AbstractContextManager[object],
        resident_bytes: int = 0,
    ) -> None:
        self._model = model
        self._store = store
        self._lock = lock
        if resident_bytes < 0:
            raise ValueError(f"resident_bytes must be 0 or more, found {resident_bytes}")
        wanted = resident_bytes > 0 and not isinstance(store, MemoryStore)
        self._resident = MemoryStore(resident_bytes) if wanted else None
        # Keys of blocks that are stored when they are computed or come again, whatever their
        # origin: system messages that were used once, and what was stored and is damaged.
        self._to_store: set[str] = set()
        self._touched: dict[str, float] = {}

    def contains(self, block: Block, *, first: bool = False) -> bool:
        """Whether there is an entry for the block; whether it is sound is seen when it is read."""
        return self._wanted([block], [first])[0].key in self._store

    def fetch(
        self,
        context: Sequence[Block],
        on_miss: OnMiss,
        check_room: Callable[[int], object] = _no_limit,
    ) -> Fetched:
        """KV of a prompt's context blocks; absent ones are computed together.

        Computed passages are stored, system messages when they come a second time (many hold a
        date or a name and never come again). Whatever else stands in a prompt is private to it,
        and stays in the memory of this process.

        Args:
            on_miss: whether passages may be computed.
            check_room: called with the tokens of all blocks before anything is computed; raises if
                there are too many.
        """
        wanted = self._wanted(context, [index == 0 for index in range(len(context))])
        distinct = {one.digest: one for one in wanted}
        found = self._look_up(distinct.values())
        absent = [one for one in distinct.values() if found[one.digest] is None]
        # A text of no tokens has no KV: nothing is missing, and it leaves no trace in the prompt.
        missing = [(one, ids) for one in absent if (ids := self._token_ids(one))]
        passages = [one for one, _ in missing if one.block.origin in _STORABLE]
        if passages and on_miss == "error":
            raise MissError(
                f"{len(passages)} of {len(wanted)} blocks are not in the store and "
                f"on_miss='error'; the first is {passages[0].block.text[:60]!r}. Encode them "
                "before (engine.encode), or use on_miss='compute'"
            )
        sizes = {one.digest: len(ids) for one, ids in missing}
        sizes |= {digest: kv.num_tokens for digest, kv in found.items() if kv is not None}
        check_room(sum(sizes.get(one.digest, 0) for one in wanted))
        for computed in self._encode(missing):
            self._keep(computed, distinct[computed.digest].block.origin)
            found[computed.digest] = computed
        blocks = [kv for one in wanted if (kv := found[one.digest]) is not None]
        missed_tokens = sum(len(ids) for _, ids in missing)
        return Fetched(blocks, len(blocks) - len(missing), len(missing), missed_tokens)

    def precompute(
        self,
        blocks: Sequence[Block],
        *,
        as_prompt: bool = False,
        show_progress: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        batch_tokens: int | None = None,
    ) -> EncodeStats:
        """Compute and store what is absent. Each batch is stored when it is done, so an
        interruption loses one batch at most.

        Args:
            as_prompt: the first of the blocks begins a prompt, and so holds the BOS token.
            on_progress: called with (blocks done, distinct blocks in all).
            batch_tokens: tokens of one encoding batch, padding included.
        """
        started = time.perf_counter()
        firsts = [as_prompt and index == 0 for index in range(len(blocks))]
        wanted = list({one.digest: one for one in self._wanted(blocks, firsts)}.values())
        absent = [one for one in wanted if not touch(self._store, one.key)]
        stats = EncodeStats(reused=len(wanted) - len(absent))
        done = stats.reused
        with tqdm(
            total=len(wanted), initial=done, desc="Encoding blocks", disable=not show_progress
        ) as bar:
            for at in range(0, len(absent), _PRECOMPUTE_WINDOW):
                window = [
                    (one, self._token_ids(one)) for one in absent[at : at + _PRECOMPUTE_WINDOW]
                ]
                for kv in self._encode(window, batch_tokens):
                    self._store.put(_key_of(kv), kv)
                    stats = _counted(stats, kv)
                    done += 1
                    bar.update()
                    if on_progress is not None:
                        on_progress(done, len(wanted))
        return replace(stats, seconds=time.perf_counter() - started)

    def _wanted(self, blocks: Sequence[Block], firsts: Sequence[bool]) -> list[_Wanted]:
        """What to look up for blocks; ``firsts``: which of them open a prompt."""
        # Read once: the model looks each time whether it is still the same.
        fingerprint, has_bos = self._model.fingerprint, bool(self._model.tokenizer.prefix_ids)
        wanted = []
        for block, first in zip(blocks, firsts, strict=True):
            # Without BOS, a block is the same at the start of a prompt as later.
            digest = block.digest(first=first and has_bos)
            wanted.append(_Wanted(store_key(fingerprint, digest), digest, block, first))
        return wanted

    def _look_up(self, wanted: Collection[_Wanted]) -> dict[str, BlockKV | None]:
        """Each block's KV by its digest, on the model's device; None if it must be computed."""
        read: dict[str, BlockKV] = {}
        found = {one.digest: self._look_up_resident(one) for one in wanted}
        for one in wanted:
            if found[one.digest] is None and (kv := self._read(one)) is not None:
                read[one.digest] = kv
        brought = to_device(list(read.values()), self._model.device)
        for digest, kv in zip(read, brought, strict=True):
            self._keep_resident(kv)
            found[digest] = kv
        return found

    def _look_up_resident(self, one: _Wanted) -> BlockKV | None:
        kv = self._resident.get(one.key) if self._resident is not None else None
        if kv is None or (kv.pending_copy is not None and kv.pending_copy.failed):
            return None
        if one.key in self._to_store:
            self._put(kv)
        elif one.block.origin in _STORABLE:
            self._touch(one.key)
        return kv

    def _note_use(self, key: str) -> None:
        if len(self._touched) >= _MOST_TOUCHED:
            self._touched.clear()
        self._touched[key] = time.monotonic()

    def _touch(self, key: str) -> None:
        """Tell the store of a block that is used and not read, once in a while: it would take what
        is used most for what nobody wants."""
        now = time.monotonic()
        if now - self._touched.get(key, -math.inf) < _TOUCH_EVERY_S:
            return
        self._note_use(key)
        try:
            touch(self._store, key)
        except StoreError as error:
            logger.warning("%s. The answer is not affected.", error)

    def _keep_resident(self, kv: BlockKV) -> None:
        if self._resident is not None and kv.nbytes <= self._resident.max_bytes:
            self._resident.put(_key_of(kv), kv)
            self._note_use(_key_of(kv))  # by reading it, or by writing it next

    def _read(self, one: _Wanted) -> BlockKV | None:
        """The stored KV if it is sound and is what was asked for. A bad entry is a miss."""
        try:
            kv = self._store.get(one.key)
        except StoreError as error:
            logger.warning("%s. The block is computed again and the entry overwritten.", error)
            self._to_store.add(one.key)
            return None
        if kv is None:
            return None
        if _key_of(kv) != one.key or kv.digest != one.digest:
            logger.warning(
                "The store holds under %s another block or another model's KV (digest %s, "
                "fingerprint %s). The block is computed again and the entry overwritten.",
                one.key, kv.digest[:12], kv.fingerprint[:12],
            )  # fmt: skip
            self._to_store.add(one.key)
            return None
        if not self._model.could_have_computed(kv):
            logger.warning(
                "The store holds under %s keys and values of another shape than this model's. The "
                "block is computed again and the entry overwritten.", one.key,
            )  # fmt: skip
            self._to_store.add(one.key)
            return None
        return kv

    def _token_ids(self, one: _Wanted) -> list[int]:
        return self._model.tokenizer.block_ids(one.block, first=one.first)

    def _encode(
        self, wanted: Sequence[tuple[_Wanted, list[int]]], batch_tokens: int | None = None
    ) -> Iterator[BlockKV]:
        """Compute blocks, given with their token ids; those of no tokens are left out."""
        requests = [EncodeRequest(ids, one.digest, one.block.handle) for one, ids in wanted if ids]
        batches = self._model.encode(requests, batch_tokens=batch_tokens)
        while True:
            with self._lock:  # one batch at a time: other requests may come in between
                batch = next(batches, None)
            if batch is None:
                return
            yield from batch

    def _keep(self, kv: BlockKV, origin: Origin) -> None:
        """Keep what an answer needed, where its origin allows it."""
        key = _key_of(kv)
        self._keep_resident(kv)
        is_memory = isinstance(self._store, MemoryStore)
        if origin in _STORABLE or is_memory or key in self._to_store:
            self._put(kv)
        elif origin == "system":
            if len(self._to_store) >= _MOST_TO_STORE:
                self._to_store.clear()
            self._to_store.add(key)

    def _put(self, kv: BlockKV) -> None:
        """Store a block. That it cannot be stored is no reason not to answer."""
        key = _key_of(kv)
        self._to_store.discard(key)
        try:
            self._store.put(key, kv)
        except StoreError as error:
            logger.warning("%s. The answer is not affected; the block is computed again.", error)


def _key_of(kv: BlockKV) -> str:
    """By what computed it: an adapter may have been switched since the block was looked up."""
    return store_key(kv.fingerprint, kv.digest)


def _counted(stats: EncodeStats, kv: BlockKV) -> EncodeStats:
    return replace(
        stats,
        computed=stats.computed + 1,
        computed_tokens=stats.computed_tokens + kv.num_tokens,
        stored_bytes=stats.stored_bytes + kv.nbytes,
    )
