"""Getting blocks' keys and values: from the store where they are, from the model where not."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakSet

from blockattn_rag.engine.options import OnMiss
from blockattn_rag.engine.prefetch import Prefetched
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.tokenised import remembering
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
from blockattn_rag.prompts.blocks import Block, Keep, is_private, keep_of
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.store.base import Found, KVStore, ResidentStore, get_many, keep, touch
from blockattn_rag.store.claims import claim
from blockattn_rag.store.device_cache import DeviceCache, with_device_cache
from blockattn_rag.store.namespaces import OPEN, Access
from blockattn_rag.store.tier import is_damage

logger = logging.getLogger("blockattn_rag")


Name = tuple[str, str]
"""Namespace and digest of a block: what tells it from others of one model."""


class Fetched(NamedTuple):
    """The KV of a prompt's context blocks, in order.

    ``places``: where each stands in the context, of which blocks of no tokens are left out;
    ``missed``: the tokens of each block that had to be computed, by name.
    """

    blocks: list[BlockKV]
    places: list[int]
    missed: Mapping[Name, int]

    @property
    def hits(self) -> int:
        """Blocks that were there; of a block that was computed, its other places in the prompt."""
        return len(self.blocks) - len(self._own_missed)

    @property
    def misses(self) -> int:
        """Blocks that had to be computed."""
        return len(self.missed)

    @property
    def missed_tokens(self) -> int:
        """Their tokens."""
        return sum(self.missed.values())

    @property
    def reused_tokens(self) -> int:
        """Tokens of the blocks that were there."""
        return sum(kv.num_tokens for kv in self.blocks) - sum(self._own_missed.values())

    @property
    def _own_missed(self) -> dict[Name, int]:
        """Of ``missed``, what is among ``blocks``: a promoted passage may have been computed."""
        names = {(kv.namespace, kv.digest) for kv in self.blocks}
        return {name: tokens for name, tokens in self.missed.items() if name in names}


PLAIN = Recipe()


class Wanted(NamedTuple):
    """A block to look up.

    ``ids``: its token ids, none if it has no keys and values; ``digest``: of these and of how it is
    encoded; ``encoded_digest``: the same before an adapter changes it; ``namespaces``: where to
    look, the first one is its own; ``keys``: in each of these; ``sink_ids``: it is encoded after
    these; ``adapter``: changes it; ``keep``: what may become of it; ``handles``: of the texts that
    were asked for and have these tokens.
    """

    keys: tuple[str, ...]
    namespaces: tuple[str, ...]
    ids: list[int]
    digest: str
    encoded_digest: str
    block: Block
    sink_ids: Sequence[int]
    adapter: Correction | None
    keep: Keep
    handles: tuple[str, ...]

    @property
    def key(self) -> str:
        """Where it is stored."""
        return self.keys[0]

    @property
    def name(self) -> Name:
        return self.namespaces[0], self.digest


def distinct(wanted: Iterable[Wanted]) -> dict[Name, Wanted]:
    """Each block once, by name, with the handles of all texts that have its tokens."""
    found: dict[Name, Wanted] = {}
    for one in wanted:
        before = found[one.name].handles if one.name in found else ()
        found[one.name] = one._replace(handles=tuple(dict.fromkeys([*before, *one.handles])))
    return found


_MOST_TO_STORE = 4096

# Blocks that prefetching holds at once besides those that stay; as many as are read in parallel.
_PREFETCHED_AT_ONCE = 16


class BlockFetcher:
    """A model and a store, and the promise that what comes out is this model's KV of these tokens.

    Args:
        store: where blocks are stored.
        resident_bytes: keep as many bytes of blocks ready in memory, if the store itself does not
            hold them there; see ``DeviceCache``.
        access: in which namespaces blocks are read and stored, and whether any is stored.
        kv_dtype: what blocks are kept in that are computed now; those in the store are read in
            whatever they were kept in. Quantised when they are computed, so that an answer is the
            same whether they were there or not.

    Raises:
        ValueError: ``kv_dtype`` is unknown, or not possible for the model.
    """

    def __init__(
        self,
        model: BlockModel,
        store: KVStore,
        resident_bytes: int = 0,
        access: Access = OPEN,
        kv_dtype: KVDtype = "model",
    ) -> None:
        self.store = store
        self.access = access
        self.kv_dtype = check_kv_dtype(kv_dtype)
        kinds = {kind for _, _, kind in model.profile.token_outline}
        if kv_dtype == "int8" and len(kinds) > 1:
            raise ValueError(
                f"{model.name} has keys and values of several number types "
                f"({', '.join(sorted(map(str, kinds)))}), which cannot be kept in int8; use "
                "kv_dtype='model'"
            )
        self._model = model
        in_memory = isinstance(store, ResidentStore)
        self._resident_bytes = math.inf if in_memory else resident_bytes
        self._cache = (
            DeviceCache(store, resident_bytes or 1)  # a store in memory is not written either
            if access.read_only
            else with_device_cache(store, resident_bytes)
        )
        self._tokenised = remembering(model.tokenizer)
        self._checked: WeakSet[BlockKV] = WeakSet()  # blocks never change: once is enough
        self._sinks: dict[str, Sequence[int]] = {}
        # Keys of blocks that are stored when they are computed or come again, whatever their
        # origin: system messages that were used once, and what was stored and is damaged.
        self._to_store: set[str] = set()

    def contains(self, block: Block, *, first: bool = False, recipe: Recipe = PLAIN) -> bool:
        """Whether there is an entry for the block; whether it is sound is seen when it is read."""
        (one,) = self.wanted([block], as_prompt=first, recipe=recipe)
        return any(key in self.store for key in one.keys)

    def claim(self, one: Wanted) -> bool:
        """Whether there is an entry that looks sound. It counts as used now, by all its texts."""
        own, *others = one.keys
        if self.access.read_only:
            others = [own, *others]
        elif claim(self.store, own, one.handles):
            return True
        return any(touch(self.store, key) for key in others)

    def fetch(
        self,
        context: Sequence[Block],
        on_miss: OnMiss,
        check_room: Callable[[int], object] | None = None,
        *,
        recipe: Recipe = PLAIN,
    ) -> Fetched:
        """KV of a prompt's context blocks; absent ones are computed together.

        Computed passages are stored, system messages when they come a second time. Whatever else
        stands in a prompt is private to it, and stays in the memory of this process.

        Args:
            on_miss: whether passages may be computed.
            check_room: called with the tokens of all blocks before anything is computed; raises if
                there are too many. Default: a context may have any length.
            recipe: How passages are encoded.
        """
        # A text of no tokens has no KV: nothing is missing, and it leaves no trace in the prompt.
        found_ids = self.wanted(context, as_prompt=True, recipe=recipe)
        places = [place for place, one in enumerate(found_ids) if one.ids]
        wanted = [found_ids[place] for place in places]
        asked = distinct(wanted)
        found = self._look_up(asked.values())
        missing = [one for one in asked.values() if one.name not in found]
        passages = [one for one in missing if keep_of(one.block.origin) == "store"]
        if passages and on_miss == "error":
            raise MissError(
                f"{len(passages)} of {len(context)} blocks are not in the store and "
                f"on_miss='error'; the first is {passages[0].block.text[:60]!r}. Encode them "
                "before (engine.encode), or use on_miss='compute'"
            )
        if check_room is not None:
            check_room(sum(len(one.ids) for one in wanted))
        for batch in self.encode(missing):
            for one, computed in batch:
                self._keep(computed, one.keep)
                found[one.name] = computed
        missed = {one.name: len(one.ids) for one in missing}
        return Fetched([found[one.name] for one in wanted], places, missed)

    def prefetch(self, blocks: Sequence[Block], *, recipe: Recipe = PLAIN) -> Prefetched:
        """Read passages from the store before the prompt that will hold them is there.

        What is read stays in memory as far as ``resident_bytes`` allow; when they are full, the
        rest is not read, because it would take the place of what came first. Nothing is read where
        they are 0.
        """
        wanted = [one for one in self.wanted(blocks, as_prompt=False, recipe=recipe) if one.ids]
        unread = list(distinct(wanted).values())
        ready: set[Name] = set()
        nbytes = 0
        while unread and nbytes < self._resident_bytes:
            found = self._look_up(unread[:_PREFETCHED_AT_ONCE])
            del unread[:_PREFETCHED_AT_ONCE]
            ready |= found.keys()
            nbytes += sum(kv.nbytes for kv in found.values())
        dropped = {one.name for one in unread}
        return Prefetched(
            sum(one.name in ready for one in wanted), sum(one.name in dropped for one in wanted)
        )

    def wanted(
        self, blocks: Sequence[Block], *, as_prompt: bool, recipe: Recipe = PLAIN
    ) -> list[Wanted]:
        """What to look up for blocks; ``as_prompt``: the first of them opens a prompt."""
        # Read once, because the model checks at each reading whether its weights have changed.
        fingerprint = self._model.fingerprint
        if recipe.adapter and fingerprint not in recipe.fingerprints:
            raise ValueError(
                f"The recipe {recipe.source or recipe} no longer belongs to {self._model.name}, "
                "which was changed since it was resolved (an adapter switched, say): make a new "
                "engine with another recipe."
            )
        has_sink = len(blocks) > as_prompt  # the first block of a prompt has none
        sink_ids = self._sink_ids(recipe.sink) if has_sink else ()
        wanted = []
        for index, block in enumerate(blocks):
            first = as_prompt and index == 0
            before, adapter = ((), None) if first else (sink_ids, recipe.adapter)
            allowed = keep_of(block.origin)
            ids, digest = self._tokenised(block, first)
            encoded = token_digest(ids, before) if before else digest
            digest = corrected_digest(encoded, adapter.digest) if adapter else encoded
            names = self.access.namespaces(private=is_private(allowed))
            keys = tuple(store_key(fingerprint, digest, name) for name in names)
            wanted.append(
                Wanted(
                    keys, names, ids, digest, encoded, block, before, adapter, allowed,
                    (block.handle,),
                )
            )  # fmt: skip
        return wanted

    def _sink_ids(self, sink: str) -> Sequence[int]:
        if sink not in self._sinks:
            self._sinks[sink] = sink_ids(sink, self._model.tokenizer)
        return self._sinks[sink]

    def encode(
        self, wanted: Sequence[Wanted], batch_tokens: int | None = None
    ) -> Iterator[list[tuple[Wanted, BlockKV]]]:
        """Compute blocks, batch by batch as ``BlockModel.encode``; those of no tokens are left out.

        A block that an adapter changes is made of the unchanged one where that is stored.
        """
        requests: dict[str, EncodeRequest] = {}
        waiting: dict[str, list[Wanted]] = {}  # blocks of the same tokens may be kept apart
        for one in wanted:
            encoded = self._encoded(one) if one.ids else None
            if encoded is not None:
                yield [(one, self._finished(encoded, one))]
            elif one.ids:
                digest = one.encoded_digest
                requests[digest] = EncodeRequest(one.ids, digest, one.block.handle, one.sink_ids)
                waiting.setdefault(digest, []).append(one)
        for batch in self._model.encode([*requests.values()], batch_tokens=batch_tokens):
            yield [(one, self._finished(kv, one)) for kv in batch for one in waiting[kv.digest]]

    def _encoded(self, one: Wanted) -> BlockKV | None:
        """What an adapter is to change, where that is stored as the model computed it."""
        if one.adapter is None:
            return None
        key = store_key(self._model.fingerprint, one.encoded_digest, one.namespaces[0])
        try:
            if (stored := self.store.get(key)) is not None:
                self._check(stored, key, one.ids)
        except StoreError:  # told to whoever asks for that entry itself
            return None
        if stored is None or stored.scales is not None:  # what was rounded is not changed again
            return None
        return stored.to(self._model.device)

    def _finished(self, encoded: BlockKV, one: Wanted) -> BlockKV:
        """A block as it is kept."""
        if one.adapter is not None:
            encoded = one.adapter.corrected(encoded, self._model.profile.layouts)
        if self.kv_dtype == "int8":
            encoded = encoded.quantised()
        handle, namespace = joined_handles(one.handles), one.namespaces[0]
        return replace(encoded, digest=one.digest, handle=handle, namespace=namespace)

    def _look_up(self, wanted: Collection[Wanted]) -> dict[Name, BlockKV]:
        """The KV of the blocks that are stored, by name, on the model's device."""
        read: dict[Name, BlockKV] = {}
        for place in range(1 + len(self.access.read_namespaces)):
            asked = [one for one in wanted if one.name not in read and place < len(one.keys)]
            keys = [one.keys[place] for one in asked]
            answers = get_many(self._cache, keys) if keys else []
            for one, key, answer in zip(asked, keys, answers, strict=True):
                if (kv := self._sound(answer, key, one)) is not None:
                    read[one.name] = kv
        device = self._model.device
        for name, kv in read.items():
            if kv.device != device:
                read[name] = kv.to(device)
                keep(self._cache, kv.key, read[name])
        return read

    def _sound(self, answer: Found, key: str, one: Wanted) -> BlockKV | None:
        """What the store said, if it is sound and is what was asked for. A bad entry is a miss."""
        try:
            if isinstance(answer, StoreError):
                raise answer
            if answer is not None:
                self._check(answer, key, one.ids)
        except StoreError as error:
            is_bad = isinstance(answer, BlockKV) or is_damage(answer)
            done = "kept in memory" if self.access.read_only else "the entry overwritten"
            done = done if is_bad else "the store asked again next time"
            logger.warning("%s. The block is computed again and %s.", error, done)
            if is_bad:  # a store that does not answer may never have held it
                self._to_store.add(one.key)
            return None
        if answer is not None and key in self._to_store:
            self._store(answer)
        return answer

    def _check(self, kv: BlockKV, key: str, ids: list[int]) -> None:
        """Refuse, by a StoreError, KV that is not what was asked for."""
        if kv.key != key:
            raise StoreError(
                f"The store holds under {key} another block or another model's KV (digest "
                f"{kv.digest[:12]}, fingerprint {kv.fingerprint[:12]})"
            )
        if kv in self._checked:
            return
        if kv.token_ids.tolist() != ids:
            raise StoreError(f"The store holds under {key} the KV of other tokens")
        if not self._model.could_have_computed(kv):
            raise StoreError(
                f"The store holds under {key} keys and values of another shape than this model's"
            )
        self._checked.add(kv)

    def _keep(self, kv: BlockKV, allowed: Keep) -> None:
        """Keep what an answer needed: in the store where that is allowed, else in memory."""
        # By the model that computed it: an adapter may have been switched since the look-up.
        key = kv.key
        if allowed == "store" or key in self._to_store:
            self._store(kv)
            return
        keep(self._cache, key, kv)
        if allowed == "memory":
            if len(self._to_store) >= _MOST_TO_STORE:
                self._to_store.clear()
            self._to_store.add(key)

    def _store(self, kv: BlockKV) -> None:
        """Store a block. That it cannot be stored is no reason not to answer."""
        self._to_store.discard(kv.key)
        if self.access.read_only:
            keep(self._cache, kv.key, kv)
            return
        try:
            self._cache.put(kv.key, kv)
        except StoreUnavailableError:  # told when the store failed, and counted there
            return
        except StoreError as error:
            logger.warning("%s. The answer is not affected; the block is computed again.", error)
