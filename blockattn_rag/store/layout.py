"""Where everything lies in an entry: known from the shapes of a block, before a byte is read.

``docs/format.md`` is the specification. After the token ids, data are ordered
``[head][keys, values][layer][token][dim]``, so that the heads of a tensor-parallel rank are one
range of bytes, and the layers of a pipeline rank one range in each head's keys and one in its
values.

A *piece* is what one layer has of one head's keys, or of its values: the unit of the checksums.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.checks import TensorSpec

LENGTH_BYTES = 8
CHECKSUM_DIGITS = 32

ALIGNMENT = 64
"""The first head starts at a multiple of this: a cache line, and the widest vector load."""

_TEXT_BYTES = 1024  # of a header: its names, with the fields that every entry has
_TENSOR_BYTES = 160  # of a header, for each tensor

Kind = Literal["keys", "values"]
KINDS: tuple[Kind, ...] = ("keys", "values")
_SCALES: dict[Kind, str] = {"keys": "key_scales", "values": "value_scales"}


class ByteRange(NamedTuple):
    """Bytes of an entry, counted from its start; ``stop`` is the first one after them."""

    start: int
    stop: int


class Piece(NamedTuple):
    """One layer of one head's keys or values: in an int8 entry its scales, and its numbers."""

    head: int
    kind: Kind
    layer: int
    ranges: tuple[ByteRange, ...]


class LayerShape(NamedTuple):
    """Key-value heads of a layer, their sizes, and the number types as they are stored."""

    heads: int
    key_size: int
    value_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype

    def of(self, kind: Kind) -> tuple[int, int, torch.dtype]:
        """Heads, head size and number type of the keys or of the values."""
        if kind == "keys":
            return self.heads, self.key_size, self.key_dtype
        return self.heads, self.value_size, self.value_dtype


@dataclass(frozen=True)  # with no slots, which would leave no room for the tensors
class Layout:
    """The places of an entry's bytes.

    Args:
        num_tokens: of the block.
        layers: one per layer.
        quantised: there are scales, because keys and values are int8.
    """

    num_tokens: int
    layers: tuple[LayerShape, ...]
    quantised: bool = False

    @classmethod
    def of(cls, kv: BlockKV) -> Layout:
        """Of the entry that holds this block."""
        layers = tuple(
            LayerShape(k.shape[0], k.shape[2], v.shape[2], k.dtype, v.dtype)
            for k, v in zip(kv.keys, kv.values, strict=True)
        )
        return cls(kv.num_tokens, layers, kv.scales is not None)

    @property
    def num_heads(self) -> int:
        """Key-value heads; of layers that differ, those of the layer that has most."""
        return max(layer.heads for layer in self.layers)

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """The tensors by name, in the order of their bytes, which count from the header's end."""
        stop = self.num_tokens * torch.int64.itemsize
        found = {"token_ids": TensorSpec(torch.int64, (self.num_tokens,), 0, stop)}
        for head in range(self.num_heads):
            for kind in KINDS:
                for name, dtype, shape in self._of_head(head, kind):
                    start, stop = stop, stop + math.prod(shape) * dtype.itemsize
                    found[name] = TensorSpec(dtype, shape, start, stop)
        return found

    @cached_property
    def data_start(self) -> int:
        """Bytes of the header, its length included. The token ids follow, then the heads.

        A function of the layout alone: whoever knows the shapes fetches header and data at once.
        """
        ids = self.num_tokens * torch.int64.itemsize
        pieces = 1 + sum(len(KINDS) * layer.heads for layer in self.layers)
        most = _TEXT_BYTES + _TENSOR_BYTES * len(self.tensors) + CHECKSUM_DIGITS * pieces + ids
        return -(-most // ALIGNMENT) * ALIGNMENT - ids

    @property
    def nbytes(self) -> int:
        """Of the whole entry."""
        return self.data_start + max(spec.stop for spec in self.tensors.values())

    def is_stacked(self, kind: Kind) -> bool:
        """Whether a head's layers are one tensor: all layers agree in their shape."""
        return kind in self._stacked

    @cached_property
    def _stacked(self) -> frozenset[Kind]:
        """Found once: it is asked for every piece, and looks at every layer."""
        found = (kind for kind in KINDS if len({layer.of(kind) for layer in self.layers}) == 1)
        return frozenset(found)

    def place(self, name: str) -> ByteRange:
        """Of a tensor."""
        spec = self.tensors[name]
        return ByteRange(self.data_start + spec.start, self.data_start + spec.stop)

    def pieces(
        self, heads: Collection[int] | None = None, layers: Collection[int] | None = None
    ) -> Iterator[Piece]:
        """The pieces of some heads and layers, all by default: by head, then kind, then layer."""
        for head in range(self.num_heads) if heads is None else heads:
            for kind in KINDS:
                for layer in range(len(self.layers)) if layers is None else layers:
                    if head < self.layers[layer].heads:
                        yield Piece(head, kind, layer, tuple(self._ranges(head, kind, layer)))

    @cached_property
    def piece_numbers(self) -> dict[tuple[int, Kind, int], int]:
        """Which piece of ``pieces`` a layer of a head's keys or values is, from 0."""
        counts = [layer.heads for layer in self.layers]
        places = (
            (head, kind, layer)
            for head in range(self.num_heads)
            for kind in KINDS
            for layer, heads in enumerate(counts)
            if head < heads
        )
        return {place: number for number, place in enumerate(places)}

    def tensor_names(self, kind: Kind) -> tuple[str, ...]:
        """What the tensors of keys or values are called within a head, in their order."""
        return (_SCALES[kind], kind) if self.quantised else (kind,)

    def tensor_of(
        self, layer: LayerShape, kind: Kind, name: str
    ) -> tuple[torch.dtype, tuple[int, ...]]:
        """Number type and shape of what one head of a layer has under one of ``tensor_names``."""
        _, size, dtype = layer.of(kind)
        if name == kind:
            return dtype, (self.num_tokens, size)
        # Of keys there is a scale for each channel, of values for each token.
        return torch.float32, (size,) if kind == "keys" else (self.num_tokens,)

    def _of_head(self, head: int, kind: Kind) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, number type and shape of one head's tensors."""
        stacked = self.is_stacked(kind)
        for name in self.tensor_names(kind):
            for index, layer in enumerate(self.layers):
                dtype, shape = self.tensor_of(layer, kind, name)
                if stacked and index == 0:
                    yield f"head.{head}.{name}", dtype, (len(self.layers), *shape)
                elif not stacked and head < layer.heads:
                    yield f"head.{head}.{name}.{index}", dtype, shape

    def _ranges(self, head: int, kind: Kind, layer: int) -> Iterator[ByteRange]:
        for name in self.tensor_names(kind):
            if self.is_stacked(kind):
                start, stop = self.place(f"head.{head}.{name}")
                row = (stop - start) // len(self.layers)
                yield ByteRange(start + layer * row, start + (layer + 1) * row)
            else:
                yield self.place(f"head.{head}.{name}.{layer}")


def ranges(
    layout: Layout, heads: Collection[int] | None = None, layers: Collection[int] | None = None
) -> list[ByteRange]:
    """The bytes of some heads and layers of an entry, as few ranges as hold nothing else.

    Heads without a gap and all layers are one range. For what ranks hold see ``share_of``.
    """
    return ranges_of(layout.pieces(heads, layers))


def ranges_of(pieces: Iterable[Piece]) -> list[ByteRange]:
    """The bytes of pieces, as few ranges as hold nothing else, in the order of the entry."""
    return _merged(place for piece in pieces for place in piece.ranges)


def share_of(rank: int, ranks: int, count: int) -> range:
    """Which of ``count`` heads or layers a rank holds.

    Every one has its rank. Of more ranks than heads, neighbours hold the same head, as where
    engines replicate key-value heads.

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= rank < ranks or count < 1:
        raise ValueError(
            f"expected a rank from 0 to {ranks - 1} and something to share out, "
            f"found rank {rank} of {ranks} and {count} to share"
        )
    start = rank * count // ranks
    return range(start, max(start + 1, (rank + 1) * count // ranks))


def _merged(places: Iterable[ByteRange]) -> list[ByteRange]:
    merged: list[ByteRange] = []
    for start, stop in sorted(places):
        if merged and merged[-1].stop >= start:
            merged[-1] = ByteRange(merged[-1].start, max(stop, merged[-1].stop))
        else:
            merged.append(ByteRange(start, stop))
    return merged
