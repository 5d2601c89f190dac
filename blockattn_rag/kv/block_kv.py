"""BlockKV: the keys and values of one block, and the key under which they are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class PendingCopy(Protocol):
    """A copy of keys and values to a device, made layer by layer while the model runs."""

    def wait(self, layer: int) -> None:
        """Return when the layer's copy may be read by what the caller does next."""

    @property
    def failed(self) -> bool:
        """Whether some layers will never be copied."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
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
        pending_copy: the copy that fills keys and values, if it may not be complete yet.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    token_ids: Tensor
    fingerprint: str
    digest: str
    handle: str
    pending_copy: PendingCopy | None = None

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values; waits for a pending copy of that layer."""
        if self.pending_copy is not None:
            self.pending_copy.wait(layer)
        return self.keys[layer], self.values[layer]

    @property
    def key(self) -> str:
        """Where a store holds this block."""
        return store_key(self.fingerprint, self.digest)

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def token_outline(self) -> tuple[tuple[int, int, torch.dtype], ...]:
        """Heads, head size and number type of each layer's keys, and then values."""
        return outline((*self.keys, *self.values))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def to(self, device: torch.device) -> BlockKV:
        """This block on ``device``; itself if it is there."""
        return self if self.device == device else self.copy_to(device)

    def copy_to(self, device: torch.device) -> BlockKV:
        """A copy on ``device`` that shares no memory with this one, not even its token ids."""
        layers = range(self.num_layers)
        keys, values = zip(*(self.states(layer) for layer in layers), strict=True)
        copies, ids = _copies((*keys, *values), device), self.token_ids.clone()
        keys, values = copies[: len(layers)], copies[len(layers) :]
        return replace(self, keys=keys, values=values, token_ids=ids, pending_copy=None)


def outline(states: Sequence[Tensor]) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Heads, head size and number type of states ``[heads, tokens, head_dim]``."""
    return tuple((t.shape[0], t.shape[2], t.dtype) for t in states)


def store_key(fingerprint: str, digest: str) -> str:
    """Where a block's KV is stored: 64 hex digits of sha256(fingerprint, digest)."""
    return hashlib.sha256(f"{fingerprint}:{digest}".encode()).hexdigest()


def _copies(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Copies on ``device`` in one piece of memory, made by one transfer."""
    if len({t.dtype for t in tensors}) > 1:  # joining them would convert them to the widest
        return tuple(t.to(device, copy=True) for t in tensors)
    joined = torch.cat([t.reshape(-1) for t in tensors]).to(device)
    parts = torch.split(joined, [t.numel() for t in tensors])
    return tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))
