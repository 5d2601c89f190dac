"""Fetches blocks: reads them from the store on a hit, and computes them on a miss."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import chain, compress
from typing import Literal, NamedTuple, get_args

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import MissError, StoreError, StoreUnavailableError
from blockattn_rag.kv.block_kv import (
    BlockKV,
    corrected_digest,
    joined_handles,
    store_key,
    token_digest,
)
from blockattn_rag.kv.quantization import KVDtype, check_kv_dtype
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.correction import Correction
from blockattn_rag.prompts.blocks import Block, Keep, keep_of
from blockattn_rag.prompts.sinks import NO_SINK, sink_ids
from blockattn_rag.store.base import KVStore, ReadResult, find_blocks, is_damage
from blockattn_rag.store.memory import MemoryStore
from blockattn_rag.store.namespaces import OPEN, Access
from blockattn_rag.store.passage_index import PassageIndex

logger = logging.getLogger("blockattn_rag")

OnMiss = Literal["compute", "error"]
"""``compute``: encode and store missing passages. ``error``: raise ``MissError`` for them."""

PLAIN = Recipe()

Name = tuple[str, str]
"""Namespace and digest of a block. Together, they identify the block among a model's blocks."""

_MOST_REMEMBERED = 4096  # Cached specs. The spec of a 256-token passage takes about 10 KiB.
_MOST_TO_STORE = 4096
_REPORT_EVERY_S = 60.0
_MOST_TIMES = 1 << 16


class BlockSpec(NamedTuple):
    """Identity of a block in the store, and the tokens that it is computed from."""

    keys: tuple[str, ...]  # Store key in each namespace.
    namespaces: tuple[str, ...]  # Namespaces to read. Only the first is written to.
    ids: list[int]  # Token ids. Empty: the block has no keys and values.
    digest: str  # Digest of the tokens, sink and adapter.
    encoded_digest: str  # Digest of the tokens and sink.
    block: Block
    sink_ids: Sequence[int]  # Prefix tokens that the block is encoded with.
    adapter: Correction | None
    keep: Keep
    handles: tuple[str, ...]  # Handles of all requested texts with these tokens.

    @property
    def key(self) -> str:
        return self.keys[0]

    @property
    def name(self) -> Name:
        return self.namespaces[0], self.digest


def _spec_of(
    model: BlockModel,
    access: Access,
    sinks: Callable[[str], Sequence[int]],
    block: Block,
    first: bool,
    sink: str,
    adapter: Correction | None,
) -> BlockSpec:
    keep = keep_of(block.origin)
    namespaces = access.namespaces(private=keep.is_private)
    ids, before = model.tokenizer.block_ids(block, first=first), sinks(sink)
    encoded = token_digest(ids, before)
    digest = corrected_digest(encoded, adapter.digest) if adapter else encoded
    return BlockSpec(
        keys=tuple(store_key(model.fingerprint, digest, name) for name in namespaces),
        namespaces=namespaces,
        ids=ids,
        digest=digest,
        encoded_digest=encoded,
        block=block,
        sink_ids=before,
        adapter=adapter,
        keep=keep,
        handles=(block.handle,),
    )


def merge_specs(specs: Iterable[BlockSpec]) -> dict[Name, BlockSpec]:
    """Merge specs with the same name, join their handles, and drop specs without tokens."""
    merged: dict[Name, BlockSpec] = {}
    for spec in specs:
        if spec.ids:
            before = merged[spec.name].handles if spec.name in merged else ()
            handles = tuple(dict.fromkeys([*before, *spec.handles]))
            merged[spec.name] = spec._replace(handles=handles)
    return merged


class Fetched(NamedTuple):
    """Keys and values of the context blocks that have tokens, in order."""

    blocks: list[BlockKV]
    is_hit: list[bool]  # Repetitions of a computed block count as hits.

    @property
    def hits(self) -> int:
        return sum(self.is_hit)

    @property
    def misses(self) -> int:
        return len(self.blocks) - self.hits

    @property
    def reused_tokens(self) -> int:
        return sum(kv.num_tokens for kv in compress(self.blocks, self.is_hit))


class BlockFetcher:
    """Reads blocks from a store, computes missing blocks, and stores new passages.

    Checks that each stored block is this model's KV for the requested tokens. ``access`` combines
    the namespace arguments of ``BlockAttentionEngine``; the other arguments are the engine's.
    """

    def __init__(
        self,
        model: BlockModel,
        store: KVStore,
        resident_bytes: int = 0,
        access: Access = OPEN,
        kv_dtype: KVDtype = "model",
        on_miss: OnMiss = "compute",
    ) -> None:
        self.store = store
        self.passages = None if store.sidecar is None else PassageIndex(store)
        self.access = access
        self.kv_dtype = check_kv_dtype(kv_dtype)
        kinds = {kind for _, _, kind in model.profile.token_outline}
        if kv_dtype == "int8" and len(kinds) > 1:
            raise ValueError(
                f"{model.name} has keys and values of several dtypes "
                f"({', '.join(sorted(map(str, kinds)))}), which int8 does not support: use "
                "kv_dtype='model'."
            )
        self._model = model
        if on_miss not in get_args(OnMiss):
            raise ValueError(f"Unknown on_miss {on_miss!r}: expected 'compute' or 'error'.")
        self._on_miss = on_miss
        sinks = cache(lambda sink: tuple(sink_ids(sink, model.tokenizer)))
        # Specs are cached, because tokenizing a block of 500 tokens takes about 0.5 ms.
        self._spec = lru_cache(_MOST_REMEMBERED)(partial(_spec_of, model, access, sinks))
        self._cache = BlockCache(store, resident_bytes, read_only=access.read_only)
        self._outline = model.profile.token_outline
        # Keys to store on the next use: system messages used once, and blocks of damaged entries.
        self._to_store: set[str] = set()

    def specs(
        self, blocks: Sequence[Block], *, as_prompt: bool, recipe: Recipe = PLAIN
    ) -> list[BlockSpec]:
        """Create the specs of blocks. ``as_prompt``: Whether the first block starts a prompt. Such
        a block has the BOS token, and neither sink nor adapter."""
        specs = []
        for index, block in enumerate(blocks):
            first = as_prompt and index == 0
            encoding = (NO_SINK, None) if first else (recipe.sink, recipe.adapter)
            specs.append(self._spec(block, first, *encoding))
        return specs

    def contains(self, block: Block, *, first: bool = False, recipe: Recipe = PLAIN) -> bool:
        """Whether the store has an entry for a block. Does not check the entry's contents."""
        (spec,) = self.specs([block], as_prompt=first, recipe=recipe)
        return any(key in self.store for key in spec.keys)

    def claim(self, spec: BlockSpec) -> bool:
        """Mark a block's entry as used now, and return whether one exists and appears intact. Adds
        the spec's handles to an entry that the fetcher may write to."""
        own, *others = spec.keys
        if self.access.read_only:
            others = [own, *others]
        elif self.store.claim(own, spec.handles):
            return True
        return any(self.store.touch(key) for key in others)

    def fetch(self, context: Sequence[BlockSpec]) -> Fetched:
        """Get the KV of a prompt's context blocks, and compute missing blocks in batches.

        New passages are stored, and system messages on their second use, unless access is
        read-only. Other blocks are only kept in memory, in the private part of the namespace.
        """
        specs = merge_specs(context)
        blocks = self._look_up([*specs.values()])
        missing = [spec for spec in specs.values() if spec.name not in blocks]
        passages = [spec for spec in missing if spec.keep.is_stored]
        if passages and self._on_miss == "error":
            raise MissError(
                f"{len(passages)} of {len(context)} blocks are not in the store, and "
                f"on_miss='error'; the first is {passages[0].block.text[:60]!r}. Encode them "
                "first (engine.encode), or use on_miss='compute'."
            )
        if missing:
            for spec, kv in chain.from_iterable(self.encode(missing)):
                self._keep(kv, spec.keep)
                blocks[spec.name] = kv
        # A text without tokens has no KV, so it is neither a hit nor a miss.
        used = [spec for spec in context if spec.ids]
        computed = {spec.name for spec in missing}
        is_hit = []
        for spec in used:
            is_hit.append(spec.name not in computed)
            computed.discard(spec.name)
        return Fetched([blocks[spec.name] for spec in used], is_hit)

    def encode(
        self, specs: Sequence[BlockSpec], batch_tokens: int | None = None
    ) -> Iterator[list[tuple[BlockSpec, BlockKV]]]:
        """Compute the KV of blocks in batches, skipping blocks without tokens. If the store has a
        block's KV without the adapter, and not as int8, only the adapter is applied."""
        requests: dict[str, EncodeRequest] = {}
        # Blocks in different namespaces may have the same tokens.
        waiting: dict[str, list[BlockSpec]] = {}
        for spec in specs:
            encoded = self._stored_without_adapter(spec) if spec.ids else None
            if encoded is not None:
                yield [(spec, self._finished(encoded, spec))]
            elif spec.ids:
                digest = spec.encoded_digest
                requests[digest] = EncodeRequest(spec.ids, digest, spec.block.handle, spec.sink_ids)
                waiting.setdefault(digest, []).append(spec)
        for batch in self._model.encode([*requests.values()], batch_tokens=batch_tokens):
            yield [(spec, self._finished(kv, spec)) for kv in batch for spec in waiting[kv.digest]]

    def _stored_without_adapter(self, spec: BlockSpec) -> BlockKV | None:
        if spec.adapter is None:
            return None
        key = store_key(self._model.fingerprint, spec.encoded_digest, spec.namespaces[0])
        plain = spec._replace(keys=(key,))
        (stored,), _ = find_blocks([plain], self.store.get_many, self._outline)
        if stored is None or stored.scales is not None:
            # Correcting int8 values would round them twice.
            return None
        return stored.to(self._model.device)

    def _finished(self, encoded: BlockKV, spec: BlockSpec) -> BlockKV:
        if spec.adapter is not None:
            encoded = spec.adapter.corrected(encoded, self._model.profile.layouts)
        if self.kv_dtype == "int8":
            encoded = encoded.quantized()
        handle, namespace = joined_handles(spec.handles), spec.namespaces[0]
        return replace(encoded, digest=spec.digest, handle=handle, namespace=namespace)

    def _look_up(self, specs: Sequence[BlockSpec]) -> dict[Name, BlockKV]:
        stored, errors = find_blocks(specs, self._cache.get_many, self._outline)
        blocks: dict[Name, BlockKV] = {}
        for spec, kv in zip(specs, stored, strict=True):
            for key in spec.keys:
                if key in errors:
                    self._note_error(spec, errors[key])
            if kv is None:
                continue
            if kv.key in self._to_store:
                self._store(kv)
            if kv.device != self._model.device:
                key, kv = kv.key, kv.to(self._model.device)
                self._cache.keep(key, kv)
            blocks[spec.name] = kv
        return blocks

    def _note_error(self, spec: BlockSpec, error: StoreError) -> None:
        if not is_damage(error):  # The store failed, so the entry may be intact.
            done = "the store is tried again next time"
        else:
            done = "kept in memory" if self.access.read_only else "the entry is overwritten"
            self._to_store.add(spec.key)
        logger.warning("%s. The block is recomputed and %s.", error, done)

    def _keep(self, kv: BlockKV, allowed: Keep) -> None:
        key = kv.key
        if allowed.is_stored or key in self._to_store:
            self._store(kv)
            return
        self._cache.keep(key, kv)
        if not allowed.is_private:
            if len(self._to_store) >= _MOST_TO_STORE:
                self._to_store.clear()
            self._to_store.add(key)

    def _store(self, kv: BlockKV) -> None:
        self._to_store.discard(kv.key)
        if self.access.read_only:
            self._cache.keep(kv.key, kv)
            return
        try:
            self._cache.put(kv.key, kv)
        except StoreUnavailableError:  # The store has already logged and counted the failure.
            return
        except StoreError as error:
            logger.warning("%s. The answer is not affected; the block is not stored.", error)


class BlockCache:
    """In-memory LRU cache of a store's blocks, which also writes blocks to the store.

    A cached block is not read from the store again, so its entry is only verified once. A
    ``MemoryStore`` gets no cache, because its blocks are already in memory, unless ``read_only``
    forbids adding blocks to it.
    """

    def __init__(self, store: KVStore, max_bytes: int, *, read_only: bool = False) -> None:
        if max_bytes < 0:
            raise ValueError(f"Invalid resident_bytes {max_bytes}: expected 0 or more.")
        self._store = store
        is_in_memory = isinstance(store, MemoryStore) and not read_only
        self._cached = None if is_in_memory else MemoryStore(max(1, max_bytes))
        self._reported_s: dict[str, float] = {}  # Time of each block's last reported use.
        self._failed_s = -math.inf  # Time of the last failed report.

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        if self._cached is None:
            return self._store.get_many(keys)
        entries: dict[str, ReadResult] = {key: self._cached.get(key) for key in keys}
        for key, kv in entries.items():
            if kv is not None:
                self._report_use(key)
        if absent := [key for key, kv in entries.items() if kv is None]:
            entries.update(zip(absent, self._store.get_many(absent), strict=True))
            for key in absent:
                if isinstance(kv := entries[key], BlockKV):
                    with suppress(ValueError):  # The caller rejects invalid blocks.
                        self.keep(key, kv)
                        self._note_use(key)
        return [entries[key] for key in keys]

    def put(self, key: str, kv: BlockKV) -> None:
        """Cache and store a block. It stays cached even if the store rejects it."""
        if self._cached is not None:
            self.keep(key, kv)
            self._note_use(key)
        self._store.put(key, kv)

    def keep(self, key: str, kv: BlockKV) -> None:
        """Cache a block without storing it. Without a cache, add it to the ``MemoryStore``."""
        if self._cached is None:
            if key not in self._store:
                self._store.put(key, kv)
        elif kv.nbytes <= self._cached.max_bytes:
            self._cached.put(key, kv)

    def _note_use(self, key: str) -> None:
        if len(self._reported_s) >= _MOST_TIMES:
            self._reported_s.clear()
        self._reported_s[key] = time.monotonic()

    def _report_use(self, key: str) -> None:
        """Report a block's use to the store, at most once a minute. Otherwise, LRU eviction would
        delete blocks that are only read from this cache. After a failure, nothing is reported for a
        minute, so that answers do not wait for a store that hangs."""
        now_s = time.monotonic()
        last_s = max(self._reported_s.get(key, -math.inf), self._failed_s)
        if now_s - last_s < _REPORT_EVERY_S:
            return
        self._note_use(key)
        try:
            self._store.mark_used(key)
        except StoreUnavailableError:  # The store has already logged and counted the failure.
            self._failed_s = now_s
        except StoreError as error:
            self._failed_s = now_s
            logger.warning("%s. The answer is not affected.", error)
