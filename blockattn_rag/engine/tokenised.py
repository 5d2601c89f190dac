"""The token ids of blocks that were looked up lately, and their digests."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from blockattn_rag.kv.block_kv import token_digest
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.prompts.tokenization import BlockTokenizer

MOST_REMEMBERED = 4096
"""Blocks whose token ids are remembered: some 10 KiB each for passages of 256 tokens."""


class Tokenised(NamedTuple):
    """A block's token ids, and ``token_digest`` of them."""

    ids: list[int]
    digest: str


def remembering(tokenizer: BlockTokenizer) -> Callable[[Block, bool], Tokenised]:
    """A function that tokenises a block (with True: as the first of its prompt, with BOS).

    What is stored is found by token ids, so every look-up needs them: 500 tokens take about half a
    millisecond, and passages come again and again. Safe to call from many threads.
    """

    def tokenised(block: Block, first: bool) -> Tokenised:
        ids = tokenizer.block_ids(block, first=first)
        return Tokenised(ids, token_digest(ids))

    return lru_cache(MOST_REMEMBERED)(tokenised)
