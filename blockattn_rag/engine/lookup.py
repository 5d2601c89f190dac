"""What to look up in a store for the blocks of a prompt: token ids, digests and keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv.block_kv import corrected_digest, store_key, token_digest
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import Correction
from blockattn_rag.prompts.blocks import Block, Keep, is_private, keep_of
from blockattn_rag.prompts.sinks import NO_SINK, sink_ids
from blockattn_rag.store.namespaces import Access

MOST_REMEMBERED = 4096
"""Number of blocks to remember. A passage of 256 tokens takes about 10 KiB."""

PLAIN = Recipe()

Name = tuple[str, str]
"""Namespace and digest of a block: its identity among the blocks of one model."""


class Wanted(NamedTuple):
    """A block to look up.

    Args:
        keys: Its store key in each of ``namespaces``.
        namespaces: Where to look for it. The first is where it is stored.
        ids: Its token ids. A block without tokens has no keys and values.
        digest: Digest of its tokens and of how it is encoded.
        encoded_digest: The same before an adapter is applied.
        block: The block.
        sink_ids: Tokens that it is encoded with.
        adapter: Applied after encoding.
        keep: Whether it may be stored.
        handles: Handles of all requested texts with these tokens.
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
    """Each block once, with the handles of all texts that have its tokens. Blocks without tokens
    are left out."""
    found: dict[Name, Wanted] = {}
    for one in wanted:
        if one.ids:
            before = found[one.name].handles if one.name in found else ()
            found[one.name] = one._replace(handles=tuple(dict.fromkeys([*before, *one.handles])))
    return found


class BlockLookup:
    """Finds out what to look up for blocks. Results are remembered, because tokenising 500 tokens
    takes about half a millisecond. Thread-safe.

    Args:
        model: The model that encodes the blocks.
        access: Namespaces to read and write.
    """

    def __init__(self, model: BlockModel, access: Access) -> None:
        self._model = model
        self._namespaces = {one: access.namespaces(private=one) for one in (False, True)}
        self._sink_ids = cache(lambda sink: tuple(sink_ids(sink, model.tokenizer)))
        self._remembered = lru_cache(MOST_REMEMBERED)(self._wanted)

    def wanted(
        self,
        blocks: Sequence[Block],
        *,
        as_prompt: bool,
        recipe: Recipe = PLAIN,
        fingerprint: str | None = None,
    ) -> list[Wanted]:
        """What to look up for blocks.

        Args:
            blocks: The blocks.
            as_prompt: Whether the first block opens a prompt: it has the BOS token and is encoded
                without sink and adapter.
            recipe: How the other blocks are encoded.
            fingerprint: The model's fingerprint, read for this request. None reads it: that checks
                whether the model was changed.

        Raises:
            ValueError: the model was changed, so the recipe's adapter no longer fits it.
        """
        fingerprint = fingerprint or self._model.fingerprint
        if recipe.adapter and fingerprint not in recipe.fingerprints:
            raise ValueError(
                f"The recipe {recipe.source or recipe} no longer belongs to {self._model.name}, "
                "which was changed since the recipe was resolved (by switching an adapter, for "
                "example): make a new engine with another recipe."
            )
        wanted = []
        for index, block in enumerate(blocks):
            first = as_prompt and index == 0
            encoding = (NO_SINK, None) if first else (recipe.sink, recipe.adapter)
            wanted.append(self._remembered(block, first, *encoding, fingerprint))
        return wanted

    def _wanted(
        self, block: Block, first: bool, sink: str, adapter: Correction | None, fingerprint: str
    ) -> Wanted:
        keep = keep_of(block.origin)
        namespaces = self._namespaces[is_private(keep)]
        ids = self._model.tokenizer.block_ids(block, first=first)
        before = self._sink_ids(sink)
        encoded = token_digest(ids, before)
        digest = corrected_digest(encoded, adapter.digest) if adapter else encoded
        return Wanted(
            keys=tuple(store_key(fingerprint, digest, name) for name in namespaces),
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
