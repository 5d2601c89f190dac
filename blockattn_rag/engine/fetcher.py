"""Getting blocks' keys and values: from the store where they are, from the model where not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakSet

from blockattn_rag.engine.options import NO_CORRECTION, OnMiss
from blockattn_rag.engine.transfer import to_device
from blockattn_rag.errors import MissError, StoreError
from blockattn_rag.kv.block_kv import BlockKV, store_key
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.correction import Correction
from blockattn_rag.prompts.blocks import Block, Origin
from blockattn_rag.prompts.sinks import FIRST_BLOCK, NO_SINK, digest_after, sink_ids
from blockattn_rag.store.base import KVStore, keep
from blockattn_rag.store.device_cache import with_device_cache

logger = logging.getLogger("blockattn_rag")


class Fetched(NamedTuple):
    """The KV of a prompt's context blocks, in order.

    ``missed``: the tokens of each block that had to be computed, by digest.
    """

    blocks: list[BlockKV]
    missed: Mapping[str, int]

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
    def _own_missed(self) -> dict[str, int]:
        """Of ``missed``, what is among ``blocks``: a promoted passage may have been computed."""
        digests = {kv.digest for kv in self.blocks}
        return {digest: tokens for digest, tokens in self.missed.items() if digest in digests}


class HowEncoded(NamedTuple):
    """How context blocks are encoded, the first one of a prompt aside.

    ``sink``: after what; see ``prompts.sinks``. ``correction``: corrects their keys and values.
    """

    sink: str = NO_SINK
    correction: Correction | None = None


ALONE = HowEncoded()


def how_encoded(model: BlockModel, sink: str, correction: str) -> HowEncoded:
    """What a sink and a correction's file, or ``"none"``, mean for a model.

    Raises:
        ValueError: the correction is for another model or another sink.
    """
    if correction == NO_CORRECTION:
        return HowEncoded(sink)
    return HowEncoded(sink, model.load_correction(correction, sink))


class Wanted(NamedTuple):
    """A block to look up.

    ``encoded_digest``: of the block before a correction changes it; ``first``: it opens a prompt;
    ``sink_ids``: it is encoded after these; ``correction``: what corrects it; ``origin``: decides
    where it may be kept, and is that of the first block where that is the sink.
    """

    key: str
    digest: str
    encoded_digest: str
    block: Block
    first: bool
    sink_ids: Sequence[int]
    correction: Correction | None
    origin: Origin


# What a miss may write to a store; a block of any other origin is private to its prompt.
_STORABLE: frozenset[Origin] = frozenset({"passage"})

_MOST_TO_STORE = 4096


class BlockFetcher:
    """A model and a store, and the promise that what comes out is this model's KV of this text.

    Args:
        store: where blocks are stored.
        resident_bytes: keep as many bytes of blocks ready in memory, if the store itself does not
            hold them there; see ``DeviceCache``.
    """

    def __init__(self, model: BlockModel, store: KVStore, resident_bytes: int = 0) -> None:
        self.store = store
        self._model = model
        self._cache = with_device_cache(store, resident_bytes)
        self._checked: WeakSet[BlockKV] = WeakSet()  # blocks never change: once is enough
        self._sinks: dict[str, Sequence[int]] = {}
        # Keys of blocks that are stored when they are computed or come again, whatever their
        # origin: system messages that were used once, and what was stored and is damaged.
        self._to_store: set[str] = set()

    def contains(self, block: Block, *, first: bool = False, how: HowEncoded = ALONE) -> bool:
        """Whether there is an entry for the block; whether it is sound is seen when it is read."""
        return self.wanted([block], as_prompt=first, how=how)[0].key in self.store

    def fetch(
        self,
        context: Sequence[Block],
        on_miss: OnMiss,
        check_room: Callable[[int], object] | None = None,
        *,
        how: HowEncoded = ALONE,
    ) -> Fetched:
        """KV of a prompt's context blocks; absent ones are computed together.

        Computed passages are stored, system messages when they come a second time (many hold a
        date or a name and never come again). Whatever else stands in a prompt is private to it,
        and stays in the memory of this process.

        Args:
            on_miss: whether passages may be computed.
            check_room: called with the tokens of all blocks before anything is computed; raises if
                there are too many. Default: a context may have any length.
            how: how blocks are encoded.
        """
        wanted = self.wanted(context, as_prompt=True, how=how)
        distinct = {one.digest: one for one in wanted}
        found = self._look_up(distinct.values())
        absent = [one for one in distinct.values() if found[one.digest] is None]
        # A text of no tokens has no KV: nothing is missing, and it leaves no trace in the prompt.
        missing = [(one, ids) for one in absent if (ids := self.token_ids(one))]
        passages = [one for one, _ in missing if one.block.origin in _STORABLE]
        if passages and on_miss == "error":
            raise MissError(
                f"{len(passages)} of {len(wanted)} blocks are not in the store and "
                f"on_miss='error'; the first is {passages[0].block.text[:60]!r}. Encode them "
                "before (engine.encode), or use on_miss='compute'"
            )
        sizes = {one.digest: len(ids) for one, ids in missing}
        sizes |= {digest: kv.num_tokens for digest, kv in found.items() if kv is not None}
        if check_room is not None:
            check_room(sum(sizes.get(one.digest, 0) for one in wanted))
        for batch in self.encode(missing):
            for computed in batch:
                self._keep(computed, distinct[computed.digest].origin)
                found[computed.digest] = computed
        blocks = [kv for one in wanted if (kv := found[one.digest]) is not None]
        missed = {one.digest: len(ids) for one, ids in missing}
        return Fetched(blocks, missed)

    def wanted(
        self, blocks: Sequence[Block], *, as_prompt: bool, how: HowEncoded = ALONE
    ) -> list[Wanted]:
        """What to look up for blocks; ``as_prompt``: the first of them opens a prompt."""
        # Read once, because the model checks at each reading whether its weights have changed.
        fingerprint, has_bos = self._model.fingerprint, bool(self._model.tokenizer.prefix_ids)
        has_sink = len(blocks) > as_prompt  # the first block of a prompt has none
        sink_ids = self._sink_ids(how.sink, blocks if as_prompt else ()) if has_sink else ()
        is_whole = how.sink == FIRST_BLOCK and as_prompt  # the first block is the sink
        head = blocks[0] if is_whole and blocks and not blocks[0].is_passage else None
        wanted = []
        for index, block in enumerate(blocks):
            first = as_prompt and index == 0
            before, correction = ((), None) if first else (sink_ids, how.correction)
            origin = block.origin if head is None else head.origin
            # Without BOS, a block is the same at the start of a prompt as later.
            encoded = digest_after(before, block.digest(first=first and has_bos))
            digest = encoded if correction is None else correction.digest_of(encoded)
            key = store_key(fingerprint, digest)
            one = Wanted(key, digest, encoded, block, first, before, correction, origin)
            wanted.append(one)
        return wanted

    def _sink_ids(self, sink: str, prompt: Sequence[Block]) -> Sequence[int]:
        if sink == FIRST_BLOCK and prompt:
            return self._model.tokenizer.block_ids(prompt[0], first=True)
        if sink not in self._sinks:
            self._sinks[sink] = sink_ids(sink, self._model.tokenizer)
        return self._sinks[sink]

    def token_ids(self, one: Wanted) -> list[int]:
        return self._model.tokenizer.block_ids(one.block, first=one.first)

    def encode(
        self, wanted: Sequence[tuple[Wanted, list[int]]], batch_tokens: int | None = None
    ) -> Iterator[list[BlockKV]]:
        """Compute blocks, given with their token ids, batch by batch as ``BlockModel.encode``;
        those of no tokens are left out. A corrected block is made of the uncorrected one where
        that is stored."""
        requests: dict[str, EncodeRequest] = {}
        waiting: dict[str, list[Wanted]] = {}  # a first block and a later one may be encoded alike
        for one, ids in wanted:
            encoded = self._encoded(one) if ids else None
            if encoded is not None:
                yield [self._corrected(encoded, one)]
            elif ids:
                digest = one.encoded_digest
                requests[digest] = EncodeRequest(ids, digest, one.block.handle, one.sink_ids)
                waiting.setdefault(digest, []).append(one)
        for batch in self._model.encode([*requests.values()], batch_tokens=batch_tokens):
            yield [self._corrected(kv, one) for kv in batch for one in waiting[kv.digest]]

    def _encoded(self, one: Wanted) -> BlockKV | None:
        """What a correction is to change, where that is stored."""
        if one.correction is None:
            return None
        key = store_key(self._model.fingerprint, one.encoded_digest)
        try:
            if (stored := self.store.get(key)) is not None:
                self._check(stored, one._replace(key=key, digest=one.encoded_digest))
        except StoreError:  # told to whoever asks for that entry itself
            return None
        return None if stored is None else stored.to(self._model.device)

    def _corrected(self, encoded: BlockKV, one: Wanted) -> BlockKV:
        if one.correction is None:
            return encoded
        return one.correction.corrected(encoded, self._model.profile.layouts)

    def _look_up(self, wanted: Collection[Wanted]) -> dict[str, BlockKV | None]:
        """Each block's KV by its digest, on the model's device; None if it must be computed."""
        found = {one.digest: self._read(one) for one in wanted}
        device = self._model.device
        elsewhere = [kv for kv in found.values() if kv is not None and kv.device != device]
        for kv in to_device(elsewhere, device):
            keep(self._cache, kv.key, kv)
            found[kv.digest] = kv
        return found

    def _read(self, one: Wanted) -> BlockKV | None:
        """The stored KV if it is sound and is what was asked for. A bad entry is a miss."""
        try:
            if (kv := self._cache.get(one.key)) is not None:
                self._check(kv, one)
        except StoreError as error:
            logger.warning("%s. The block is computed again and the entry overwritten.", error)
            self._to_store.add(one.key)
            return None
        if kv is not None and one.key in self._to_store:
            self._store(kv)
        return kv

    def _check(self, kv: BlockKV, one: Wanted) -> None:
        """Refuse, by a StoreError, KV that is not what was asked for."""
        if kv.key != one.key or kv.digest != one.digest:
            raise StoreError(
                f"The store holds under {one.key} another block or another model's KV (digest "
                f"{kv.digest[:12]}, fingerprint {kv.fingerprint[:12]})"
            )
        if kv not in self._checked and not self._model.could_have_computed(kv):
            raise StoreError(
                f"The store holds under {one.key} keys and values of another shape than this "
                "model's"
            )
        self._checked.add(kv)

    def _keep(self, kv: BlockKV, origin: Origin) -> None:
        """Keep what an answer needed: in the store where its origin allows it, else in memory."""
        # By the model that computed it: an adapter may have been switched since the look-up.
        key = kv.key
        if origin in _STORABLE or key in self._to_store:
            self._store(kv)
            return
        keep(self._cache, key, kv)
        if origin == "system":
            if len(self._to_store) >= _MOST_TO_STORE:
                self._to_store.clear()
            self._to_store.add(key)

    def _store(self, kv: BlockKV) -> None:
        """Store a block. That it cannot be stored is no reason not to answer."""
        self._to_store.discard(kv.key)
        try:
            self._cache.put(kv.key, kv)
        except StoreError as error:
            logger.warning("%s. The answer is not affected; the block is computed again.", error)
