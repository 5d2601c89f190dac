"""Lookup of the token ids, digests and store keys of a prompt's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv.block_kv import corrected_digest, store_key, token_digest
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import Correction
from blockattn_rag.prompts.blocks import Block, Keep, keep_of
from blockattn_rag.prompts.sinks import NO_SINK, sink_ids
from blockattn_rag.store.namespaces import Access

MOST_REMEMBERED = 4096
"""Number of lookups to cache. The entry for a passage of 256 tokens takes about 10 KiB."""

PLAIN = Recipe()

Name = tuple[str, str]
"""Namespace and digest of a block, which identify it among a model's blocks."""


class BlockSpec(NamedTuple):
    """Identity of a block in the store, and the tokens that it is computed from."""

    keys: tuple[str, ...]  # Store key in each namespace.
    namespaces: tuple[str, ...]  # The block is stored in the first one.
    ids: list[int]  # A block without tokens has no keys and values.
    digest: str  # Of the tokens, sink and adapter.
    encoded_digest: str  # Before the adapter is applied.
    block: Block
    sink_ids: Sequence[int]  # Prefix tokens that the block is encoded with.
    adapter: Correction | None
    keep: Keep
    handles: tuple[str, ...]  # Of all requested texts with these tokens.

    @property
    def key(self) -> str:
        return self.keys[0]

    @property
    def name(self) -> Name:
        return self.namespaces[0], self.digest


def merge_specs(specs: Iterable[BlockSpec]) -> dict[Name, BlockSpec]:
    """Merge blocks with the same name, and join their handles. Drops blocks without tokens."""
    merged: dict[Name, BlockSpec] = {}
    for spec in specs:
        if spec.ids:
            before = merged[spec.name].handles if spec.name in merged else ()
            handles = tuple(dict.fromkeys([*before, *spec.handles]))
            merged[spec.name] = spec._replace(handles=handles)
    return merged


class BlockLookup:
    """Computes the token ids and store keys of blocks. Thread-safe. Results are cached, because
    tokenizing 500 tokens takes about half a millisecond."""

    def __init__(self, model: BlockModel, access: Access) -> None:
        self._model = model
        self._namespaces = {
            is_private: access.namespaces(private=is_private) for is_private in (False, True)
        }
        self._sink_ids = cache(lambda sink: tuple(sink_ids(sink, model.tokenizer)))
        self._spec = lru_cache(MOST_REMEMBERED)(self._make_spec)

    def specs(
        self, blocks: Sequence[Block], *, as_prompt: bool, recipe: Recipe = PLAIN
    ) -> list[BlockSpec]:
        """Look up blocks. The first block of a prompt has the BOS token, and is encoded without
        sink and adapter."""
        starts = [self._spec(block, True, NO_SINK, None) for block in blocks[:as_prompt]]
        others = blocks[as_prompt:]
        return starts + [self._spec(block, False, recipe.sink, recipe.adapter) for block in others]

    def _make_spec(
        self, block: Block, first: bool, sink: str, adapter: Correction | None
    ) -> BlockSpec:
        fingerprint = self._model.fingerprint
        keep = keep_of(block.origin)
        namespaces = self._namespaces[keep.is_private]
        ids = self._model.tokenizer.block_ids(block, first=first)
        before = self._sink_ids(sink)
        encoded = token_digest(ids, before)
        digest = corrected_digest(encoded, adapter.digest) if adapter else encoded
        return BlockSpec(
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
