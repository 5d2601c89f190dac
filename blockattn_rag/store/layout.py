"""Layout of an entry's tensors, derived from the shapes of its block (``docs/format.md``).

Layers of equal shape and dtype form a group. Each head of a group has one key tensor and one value
tensor, so that a tensor-parallel rank reads complete tensors and can verify their checksums.
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
    """Number of key-value heads of a layer, head sizes, and stored dtypes."""

    heads: int
    key_size: int
    value_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype


class LayerGroup(NamedTuple):
    """Layers of equal shape, with their indices in ascending order."""

    shape: LayerShape
    layers: tuple[int, ...]


@dataclass(frozen=True)  # No slots, because of the cached properties.
class Layout:
    """Shapes and dtypes of an entry's tensors."""

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
        """Types of tensors that each head has."""
        return (*_KINDS, *_SCALES) if self.quantized else _KINDS

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Groups of layers, ordered by their first layers."""
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
        """Upper bound of the header size in bytes, including the length field.

        Does not depend on the number of tokens.
        """
        return 3072 + 8 * len(self.layers) + 256 * len(self.tensors)

    def _of_groups(self) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
        for number, (shape, layers) in enumerate(self.groups):
            count, tokens = len(layers), self.num_tokens
            specs = {
                "keys": (shape.key_dtype, (count, tokens, shape.key_size)),
                "values": (shape.value_dtype, (count, tokens, shape.value_size)),
                # Keys have one scale per channel, values one per token.
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
    """Return the indices of the heads or layers of a rank, out of ``count``.

    If there are more ranks than heads, neighboring ranks share a head, as in engines that replicate
    key-value heads.
    """
    if not 0 <= rank < ranks or count < 1:
        raise ValueError(
            f"Expected a rank from 0 to {ranks - 1} and a count of at least 1, "
            f"found rank {rank} of {ranks} and count {count}"
        )
    start = rank * count // ranks
    return range(start, max(start + 1, (rank + 1) * count // ranks))
