"""Shares: the heads and layers of each block that one rank of a server reads.

Tensor-parallel ranks split the heads of each layer, and pipeline-parallel ranks split the layers. A
rank keeps only its own heads and layers, and reads only these if the store supports partial reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from blockattn_rag.errors import FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.model.correction import Correction, LayerCorrection
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.store.base import KVStore, MaintainedStore, ReadResult, StoreStats
from blockattn_rag.store.header import Header, LayerShape, Layout, share_of

# Read up to 1024 token ids together with the header, to save a request.
_IDS_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's layers, and its key-value heads in each of them."""

    layers: range
    heads: tuple[range, ...]

    @classmethod
    def of(
        cls, profile: ModelProfile, rank: int = 0, ranks: int = 1, layers: range | None = None
    ) -> Share:
        """Create the share of a tensor-parallel rank. If there are more ranks than heads, ranks
        share heads. ``layers``: Layers of the pipeline-parallel rank. Default: all layers."""
        layers = range(len(profile.layers)) if layers is None else layers
        heads = (share_of(rank, ranks, profile.layers[layer].kv_heads) for layer in layers)
        return cls(layers, tuple(heads))

    @property
    def name(self) -> str:
        """Name that is unique among a model's shares, such as ``layers-0-32-heads-2-4``."""
        found = f"layers-{self.layers.start}-{self.layers.stop}"
        if len(set(self.heads)) > 1:
            every = ",".join(f"{heads.start}-{heads.stop}" for heads in self.heads)
            return f"{found}-heads-{hashlib.sha256(every.encode()).hexdigest()[:16]}"
        return f"{found}-heads-{self.heads[0].start}-{self.heads[0].stop}"

    def token_outline(self, profile: ModelProfile) -> tuple[tuple[int, int, torch.dtype], ...]:
        """Return ``BlockKV.token_outline`` for this share: keys by layer, then values."""
        own = [profile.layers[layer] for layer in self.layers]
        shapes = [*zip(self.heads, (layer.key_size for layer in own), strict=True)]
        shapes += zip(self.heads, (layer.value_size for layer in own), strict=True)
        return tuple((len(heads), size, profile.dtype) for heads, size in shapes)

    def cut(self, kv: BlockKV) -> BlockKV:
        return kv.with_tensors(
            [
                [tensor[heads.start : heads.stop].clone() for tensor in kv.tensors(layer)]
                for layer, heads in zip(self.layers, self.heads, strict=True)
            ]
        )

    def cut_adapter(self, adapter: Correction) -> Correction:
        """Copy this share of an adapter, for ``Correction.applied``. The copy's digest differs."""
        layers = [
            LayerCorrection(*(t[heads.start : heads.stop].clone() for t in adapter.layers[layer]))
            for layer, heads in zip(self.layers, self.heads, strict=True)
        ]
        return replace(adapter, layers=tuple(layers))


def open_share(home: KVStore, share: Share, profile: ModelProfile) -> KVStore:
    """Return a rank's store: a ``ShareStore``, or the home if the share is the complete block."""
    return home if share == Share.of(profile) else ShareStore(home, share, profile)


class ShareStore(KVStore):
    """Read-only view of another store that returns one rank's share of each block. From a
    ``MaintainedStore``, only this share is read; from other stores, complete entries are read."""

    def __init__(self, home: KVStore, share: Share, profile: ModelProfile) -> None:
        self.home = home
        self.share = share
        self._profile = profile
        layouts = (_layout(profile, 1, quantized) for quantized in (False, True))
        self._head_bytes = max(layout.most_header_bytes for layout in layouts) + _IDS_BYTES

    def __repr__(self) -> str:
        heads = self.share.heads[0]
        return f"ShareStore({self.home!r}, heads={heads}, layers={self.share.layers})"

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        if not isinstance(self.home, MaintainedStore):
            return [self._cut(found) for found in self.home.get_many(keys)]
        return self.home.read_parts(keys, self._choose, self._head_bytes)

    def touch(self, key: str) -> bool:
        return self.home.touch(key)

    def put(self, key: str, kv: BlockKV) -> None:
        raise StoreError(f"Cannot store {key} in {self!r}, which is read-only; use {self.home!r}")

    def delete(self, key: str) -> bool:
        raise StoreError(f"Cannot delete {key} in {self!r}, which is read-only; use {self.home!r}")

    def __contains__(self, key: object) -> bool:
        return key in self.home

    def keys(self) -> Iterator[str]:
        return self.home.keys()

    def stats(self) -> StoreStats:
        return self.home.stats()

    def _choose(self, header: Header) -> dict[int, range]:
        layout = header.layout
        expected = _layout(self._profile, layout.num_tokens, layout.quantized)
        if layout != expected or header.dtype != self._profile.dtype:
            raise _other_shape(header.key)
        return dict(zip(self.share.layers, self.share.heads, strict=True))

    def _cut(self, found: ReadResult) -> ReadResult:
        if not isinstance(found, BlockKV):
            return found
        if found.token_outline != Share.of(self._profile).token_outline(self._profile):
            return _other_shape(found.key)
        return self.share.cut(found)


def _layout(profile: ModelProfile, num_tokens: int, quantized: bool) -> Layout:
    dtype = torch.int8 if quantized else profile.dtype
    shapes = (
        LayerShape(layer.kv_heads, layer.key_size, layer.value_size, dtype, dtype)
        for layer in profile.layers
    )
    return Layout(num_tokens, tuple(shapes), quantized)


def _other_shape(key: str) -> FingerprintMismatchError:
    return FingerprintMismatchError(
        f"The keys and values of the entry {key} do not have the shapes or dtype of the server's "
        "model; serve the model that the entry was computed with, or delete the entry"
    )
