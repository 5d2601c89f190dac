"""BlockKV: the keys and values of one block, and how blocks are put together into one context."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

import torch

from blockattn_rag.kv.rope import RotaryLayout, rotate

if TYPE_CHECKING:
    from torch import Tensor


class Arrival(Protocol):
    """States on their way to a device."""

    def wait(self, layer: int) -> None:
        """Return when a layer may be read by what the caller does next."""

    @property
    def failed(self) -> bool:
        """Whether some layers will never be there."""


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
        arrival: what to wait for before a layer is read, if they are still on their way here.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    token_ids: Tensor
    fingerprint: str
    digest: str
    handle: str
    arrival: Arrival | None = None

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, when they are there."""
        if self.arrival is not None:
            self.arrival.wait(layer)
        return self.keys[layer], self.values[layer]

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
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def to(self, device: torch.device) -> BlockKV:
        """This block on ``device``; itself if it is there."""
        return self if self.device == device else self.copy_to(device)

    def copy_to(self, device: torch.device) -> BlockKV:
        """A copy on ``device`` that shares no memory with this one, not even its token ids."""
        layers = [self.states(layer) for layer in range(self.num_layers)]
        states = [*(keys for keys, _ in layers), *(values for _, values in layers)]
        copies = _copies(states, device)
        return replace(
            self,
            keys=copies[: self.num_layers],
            values=copies[self.num_layers :],
            token_ids=self.token_ids.clone(),
            arrival=None,
        )


def store_key(fingerprint: str, digest: str) -> str:
    """Where a block's KV is stored: 64 hex digits of sha256(fingerprint, digest)."""
    return hashlib.sha256(f"{fingerprint}:{digest}".encode()).hexdigest()


Positions = Literal["reordered", "composite"]
"""``reordered``: a block's keys are re-encoded for where the block stands (both papers' method).
``composite``: they keep positions 0..n-1 (both papers' ablation)."""


Assembly = Literal["auto", "relay", "copy"]
"""``relay``: blocks are attended to where they lie. ``copy``: their keys are re-encoded and joined
into new tensors. ``auto``: relay where it is exact, else copy."""


class PlacedBlock(NamedTuple):
    """A block and where it stands: its first token's index in the prompt, and its keys' shift."""

    kv: BlockKV
    start: int
    shift: int


@dataclass(frozen=True, slots=True)
class Context:
    """Blocks in the order of the prompt, each with its place. Nothing is copied."""

    blocks: tuple[PlacedBlock, ...]

    @property
    def num_tokens(self) -> int:
        return sum(block.kv.num_tokens for block in self.blocks)

    @property
    def token_ids(self) -> list[int]:
        return [token for block in self.blocks for token in block.kv.token_ids.tolist()]


def place(blocks: Sequence[BlockKV], positions: Positions = "reordered") -> Context:
    """Give each block its position in this prompt (Block-Attention, section 2.3)."""
    if positions not in get_args(Positions):
        raise ValueError(f"positions must be one of {get_args(Positions)}, found {positions!r}")
    placed, start = [], 0
    for kv in blocks:
        placed.append(PlacedBlock(kv, start, start if positions == "reordered" else 0))
        start += kv.num_tokens
    return Context(tuple(placed))


def assemble(context: Context, layouts: Sequence[RotaryLayout]) -> Iterator[tuple[Tensor, Tensor]]:
    """The copy path: per layer, one key and one value tensor for the whole context.

    Args:
        context: at least one placed block.
        layouts: one per layer.

    Yields:
        Keys re-encoded by each block's shift, and values, both ``[num_kv_heads, tokens, head_dim]``
        in the blocks' dtype. The stored tensors are not written; a context of one unshifted block
        yields the stored tensors themselves.
    """
    # Layers of one layout share the angles; there are one or two layouts in a model.
    tables: dict[RotaryLayout, tuple[Tensor, Tensor]] = {}
    for index, layout in enumerate(layouts):
        yield joined_states(context.blocks, index, layout, tables)


def joined_states(
    blocks: Sequence[PlacedBlock],
    layer: int,
    layout: RotaryLayout,
    tables: dict[RotaryLayout, tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """One layer of :func:`assemble`.

    Args:
        tables: angles that earlier layers made, to which this one adds its own.
    """
    states = [block.kv.states(layer) for block in blocks]
    keys, values = (_joined(list(tensors)) for tensors in zip(*states, strict=True))
    if layout.rotates and any(block.shift for block in blocks):
        if layout not in tables:
            shifts = [torch.full((b.kv.num_tokens,), b.shift) for b in blocks]
            tables[layout] = layout.cos_sin(torch.cat(shifts), keys.device)
        keys = rotate(keys, *tables[layout], layout)
    return keys, values


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=-2)


def _copies(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Copies on ``device`` in one piece of memory, made by one transfer."""
    if len({t.dtype for t in tensors}) > 1:  # joining them would convert them to the widest
        return tuple(t.to(device, copy=True) for t in tensors)
    joined = torch.cat([t.reshape(-1) for t in tensors]).to(device)
    parts = torch.split(joined, [t.numel() for t in tensors])
    return tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))
