"""BlockKV: the keys and values of one block, and how blocks are put together into one context."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blockattn_rag.rope import RotaryLayout, shift_positions

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlockKV:
    """Keys and values of one block, computed from the block's tokens alone. Never written to.

    Args:
        keys: per layer ``[num_kv_heads, num_tokens, head_dim]``, rotated for positions
            ``0..num_tokens-1``; model dtype.
        values: per layer, same shape but for the head size.
        token_ids: ``[num_tokens]``, int64, on the CPU: a hit needs no tokenising.
        fingerprint: identity of the model, tokenizer and dtype that computed it.
        digest: ``Block.digest`` of what was encoded; compared on every hit.
        handle: ``Block.handle``; lets ``store gc`` find the entries of a passage.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    token_ids: Tensor
    fingerprint: str
    digest: str
    handle: str

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


def store_key(fingerprint: str, digest: str) -> str:
    """Where a block's KV is stored: 64 hex digits of sha256(fingerprint, digest)."""
    return hashlib.sha256(f"{fingerprint}:{digest}".encode()).hexdigest()
