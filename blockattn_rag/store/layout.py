"""Layout of an entry's tensors, which follows from the shapes of a block (``docs/format.md``).

Layers of equal shape and dtype form a group. Each head of a group has one tensor of keys and one
tensor of values, so that a tensor-parallel rank reads complete tensors, and can verify each read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from blockattn_rag.kv.block_kv import BlockKV

TOKEN_IDS = "token_ids"
_KINDS = ("keys", "values")
_SCALES = ("key_scales", "value_scales")


class LayerShape(NamedTuple):
    """Key-value heads of a layer, their sizes, and the stored dtypes."""

    heads: int
    key_size: int
    value_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype


class LayerGroup(NamedTuple):
    """Layers of equal shape: their indices, in order."""

    shape: LayerShape
    layers: tuple[int, ...]


@dataclass(frozen=True)  # Without slots, because of the cached properties.
class Layout:
    """Shapes of an entry."""

    num_tokens: int
    layers: tuple[LayerShape, ...]
    quantized: bool = False

    @classmethod
    def of(cls, kv: BlockKV) -> Layout:
        layers = tuple(
            LayerShape(k.shape[0], k.shape[2], v.shape[2], k.dtype, v.dtype)
            for k, v in zip(kv.keys, kv.values, strict=True)
        )
        return cls(kv.num_tokens, layers, kv.scales is not None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of tensors that each head has."""
        return (*_KINDS, *_SCALES) if self.quantized else _KINDS

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Groups of layers, in the order of their first layers."""
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(self.layers):
            groups.setdefault(shape, []).append(layer)
        return tuple(LayerGroup(shape, tuple(layers)) for shape, layers in groups.items())

    @cached_property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtypes and shapes of all tensors, by name."""
        return {TOKEN_IDS: (torch.int64, (self.num_tokens,)), **dict(self._of_groups())}

    @property
    def most_header_bytes(self) -> int:
        """Upper bound of the header's size in bytes, including its length field.

        It does not depend on the number of tokens.
        """
        return 3072 + 8 * len(self.layers) + 256 * len(self.tensors)

    def _of_groups(self) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
        for number, (shape, layers) in enumerate(self.groups):
            count, tokens = len(layers), self.num_tokens
            specs = {
                "keys": (shape.key_dtype, (count, tokens, shape.key_size)),
                "values": (shape.value_dtype, (count, tokens, shape.value_size)),
                # Keys have a scale per channel, values per token.
                "key_scales": (torch.float32, (count, shape.key_size)),
                "value_scales": (torch.float32, (count, tokens)),
            }
            for head in range(shape.heads):
                for kind in self.kinds:
                    yield tensor_name(head, kind, number), specs[kind]


def tensor_name(head: int, kind: str, group: int) -> str:
    """Name of a tensor. Files are sorted by dtype and name, so consecutive heads are adjacent."""
    return f"head.{head:04}.{kind}.{group:02}"


def share_of(rank: int, ranks: int, count: int) -> range:
    """Indices of a rank's heads or layers, out of ``count``.

    With more ranks than heads, neighboring ranks have the same head, as in engines that replicate
    key-value heads.
    """
    if not 0 <= rank < ranks or count < 1:
        raise ValueError(
            f"Expected a rank from 0 to {ranks - 1} and a count of at least 1, "
            f"found rank {rank} of {ranks} and count {count}"
        )
    start = rank * count // ranks
    return range(start, max(start + 1, (rank + 1) * count // ranks))
