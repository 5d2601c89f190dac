"""Byte layout of an entry, which follows from the shapes of a block.

``docs/format.md`` is the specification. After the token ids, data are ordered
``[head][keys, values][layer][token][dim]``, so that the heads of a tensor-parallel rank are one
byte range, and the layers of a pipeline rank one range in each head's keys and one in its values.

A *piece* is one layer of one head's keys or values: the unit of the checksums.
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
"""Alignment of the first head: a cache line, and the widest vector load."""

_TEXT_BYTES = 1024  # space in a header for names and the fields of every entry
_TENSOR_BYTES = 160  # space in a header for each tensor

Kind = Literal["keys", "values"]
KINDS: tuple[Kind, ...] = ("keys", "values")
_SCALES: dict[Kind, str] = {"keys": "key_scales", "values": "value_scales"}


class ByteRange(NamedTuple):
    """Range of bytes of an entry, counted from its start."""

    start: int
    stop: int


class Piece(NamedTuple):
    """One layer of one head's keys or values. In an int8 entry, it includes the scales."""

    head: int
    kind: Kind
    layer: int
    ranges: tuple[ByteRange, ...]


class LayerShape(NamedTuple):
    """Key-value heads of a layer, their sizes, and the stored dtypes."""

    heads: int
    key_size: int
    value_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype

    def of(self, kind: Kind) -> tuple[int, int, torch.dtype]:
        """Heads, head size and dtype of the keys or of the values."""
        if kind == "keys":
            return self.heads, self.key_size, self.key_dtype
        return self.heads, self.value_size, self.value_dtype


@dataclass(frozen=True)  # without slots, for the cached properties
class Layout:
    """Byte layout of an entry.

    Args:
        num_tokens: Number of tokens of the block.
        layers: Shape of each layer.
        quantised: Whether keys and values are int8 and have scales.
    """

    num_tokens: int
    layers: tuple[LayerShape, ...]
    quantised: bool = False

    @classmethod
    def of(cls, kv: BlockKV) -> Layout:
        """Layout of the entry of a block."""
        layers = tuple(
            LayerShape(k.shape[0], k.shape[2], v.shape[2], k.dtype, v.dtype)
            for k, v in zip(kv.keys, kv.values, strict=True)
        )
        return cls(kv.num_tokens, layers, kv.scales is not None)

    @property
    def num_heads(self) -> int:
        """Key-value heads of the layer that has the most."""
        return max(layer.heads for layer in self.layers)

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Tensors by name, in byte order. Offsets count from the end of the header."""
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
        """Size of the header in bytes, including its length field. Token ids and heads follow.

        The size depends on the layout alone, so header and data can be fetched together.
        """
        ids = self.num_tokens * torch.int64.itemsize
        pieces = 1 + sum(len(KINDS) * layer.heads for layer in self.layers)
        most = _TEXT_BYTES + _TENSOR_BYTES * len(self.tensors) + CHECKSUM_DIGITS * pieces + ids
        return -(-most // ALIGNMENT) * ALIGNMENT - ids

    @property
    def nbytes(self) -> int:
        """Bytes of the complete entry."""
        return self.data_start + max(spec.stop for spec in self.tensors.values())

    def is_stacked(self, kind: Kind) -> bool:
        """Whether a head's layers are one tensor, because all layers have the same shape."""
        return kind in self._stacked

    @cached_property
    def _stacked(self) -> frozenset[Kind]:
        """Kinds whose layers are stacked. Cached, because every piece needs them."""
        found = (kind for kind in KINDS if len({layer.of(kind) for layer in self.layers}) == 1)
        return frozenset(found)

    def place(self, name: str) -> ByteRange:
        """Byte range of a tensor."""
        spec = self.tensors[name]
        return ByteRange(self.data_start + spec.start, self.data_start + spec.stop)

    def pieces(
        self, heads: Collection[int] | None = None, layers: Collection[int] | None = None
    ) -> Iterator[Piece]:
        """Pieces of some heads and layers (default: all), by head, then kind, then layer."""
        for head in range(self.num_heads) if heads is None else heads:
            for kind in KINDS:
                for layer in range(len(self.layers)) if layers is None else layers:
                    if head < self.layers[layer].heads:
                        yield Piece(head, kind, layer, tuple(self._ranges(head, kind, layer)))

    @cached_property
    def piece_numbers(self) -> dict[tuple[int, Kind, int], int]:
        """Index in ``pieces`` of each layer of a head's keys or values."""
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
        """Names of the tensors of keys or values within a head, in order."""
        return (_SCALES[kind], kind) if self.quantised else (kind,)

    def tensor_of(
        self, layer: LayerShape, kind: Kind, name: str
    ) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of one head of a layer in the tensor ``name``, one of
        ``tensor_names``."""
        _, size, dtype = layer.of(kind)
        if name == kind:
            return dtype, (self.num_tokens, size)
        # Keys have a scale per channel, values per token.
        return torch.float32, (size,) if kind == "keys" else (self.num_tokens,)

    def _of_head(self, head: int, kind: Kind) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of one head's tensors."""
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


def ranges(pieces: Iterable[Piece]) -> list[ByteRange]:
    """Byte ranges of pieces, sorted and merged.

    Consecutive heads with all their layers are one range. For the heads of a rank, see
    ``share_of``.
    """
    merged: list[ByteRange] = []
    for start, stop in sorted(place for piece in pieces for place in piece.ranges):
        if merged and merged[-1].stop >= start:
            merged[-1] = ByteRange(merged[-1].start, max(stop, merged[-1].stop))
        else:
            merged.append(ByteRange(start, stop))
    return merged


def share_of(rank: int, ranks: int, count: int) -> range:
    """Indices of a rank's heads or layers, out of ``count``.

    With more ranks than heads, neighbouring ranks have the same head, as in engines that replicate
    key-value heads.

    Raises:
        ValueError: There is no such rank.
    """
    if not 0 <= rank < ranks or count < 1:
        raise ValueError(
            f"expected a rank from 0 to {ranks - 1} and a count of at least 1, "
            f"found rank {rank} of {ranks} and count {count}"
        )
    start = rank * count // ranks
    return range(start, max(start + 1, (rank + 1) * count // ranks))
