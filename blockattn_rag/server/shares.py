"""What one rank of a server holds of each block: its heads, of its layers.

Tensor-parallel ranks share out the heads of each layer, pipeline-parallel ranks the layers. A rank
reads no more than it holds: entries are ordered so that this is one range of bytes, or few.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import torch

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.store.base import (
    EntryPart,
    Found,
    KVStore,
    RangeStore,
    StoreStats,
    get_many,
    touch,
)
from blockattn_rag.store.format import decode_part
from blockattn_rag.store.header import FormatError, Header
from blockattn_rag.store.layout import ByteRange, LayerShape, Layout, Piece, ranges_of, share_of

# Read with the header, in which they would take a request of their own: ids of 1024 tokens.
_IDS_BYTES = 8 << 10

_MOST_LAYOUTS = 256


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds.

    Args:
        layers: of the model.
        heads: key-value heads of each of these layers.
    """

    layers: range
    heads: tuple[range, ...]

    @classmethod
    def of(
        cls, profile: ModelProfile, rank: int = 0, ranks: int = 1, layers: range | None = None
    ) -> Share:
        """The share of a tensor-parallel rank: of more ranks than heads, some hold the same ones.

        Args:
            layers: of its pipeline-parallel rank; None for all.

        Raises:
            ValueError: there is no such rank, or no such layers.
        """
        every = range(profile.num_layers)
        layers = every if layers is None else layers
        if not layers or layers.step != 1 or layers[0] not in every or layers[-1] not in every:
            raise ValueError(f"found {layers} for layers, expected some of {every}")
        heads = (share_of(rank, ranks, profile.layers[layer].kv_heads) for layer in layers)
        return cls(layers, tuple(heads))

    @property
    def name(self) -> str:
        """What it is called among shares of one model, such as ``layers-0-32-heads-2-4``: for the
        folder in which a rank keeps what it has read."""
        found = f"layers-{self.layers.start}-{self.layers.stop}"
        if len(set(self.heads)) > 1:
            every = ",".join(f"{heads.start}-{heads.stop}" for heads in self.heads)
            return f"{found}-heads-{hashlib.sha256(every.encode()).hexdigest()[:16]}"
        return f"{found}-heads-{self.heads[0].start}-{self.heads[0].stop}"

    def is_whole(self, profile: ModelProfile) -> bool:
        """Whether it is all of every block."""
        return self == Share.of(profile)

    def token_outline(self, profile: ModelProfile) -> tuple[tuple[int, int, torch.dtype], ...]:
        """``BlockKV.token_outline`` of this share of a model's blocks."""
        own = [profile.layers[layer] for layer in self.layers]
        shapes = [*zip(self.heads, (layer.key_size for layer in own), strict=True)]
        shapes += zip(self.heads, (layer.value_size for layer in own), strict=True)
        return tuple((len(heads), size, profile.torch_dtype) for heads, size in shapes)

    def bytes_per_token(self, profile: ModelProfile) -> int:
        """Of this share's keys and values, not quantised."""
        outline = self.token_outline(profile)
        return sum(heads * size * dtype.itemsize for heads, size, dtype in outline)

    def pieces(self, layout: Layout) -> list[Piece]:
        """This share of an entry."""
        each = zip(self.layers, self.heads, strict=True)
        return [piece for layer, heads in each for piece in layout.pieces(heads, [layer])]

    def cut(self, kv: BlockKV) -> BlockKV:
        """This share of a whole block, in memory of its own."""
        for layer in self.layers:
            kv.stored(layer)  # waits for it
        return kv.with_tensors(
            [
                [tensor[heads.start : heads.stop].clone() for tensor in kv.tensors(layer)]
                for layer, heads in zip(self.layers, self.heads, strict=True)
            ]
        )


def open_share(home: KVStore, share: Share, profile: ModelProfile) -> KVStore:
    """What a rank reads from: a ``ShareStore``, or the home itself where the share is whole."""
    return home if share.is_whole(profile) else ShareStore(home, share, profile)


class ShareStore:
    """``KVStore`` of a rank's share of each block in another store; it is only read.

    What it gives is the block of that key with these heads and layers alone, checked as whole
    entries are. It comes by ranges of bytes from stores that can be read so, in two requests for
    any number of keys; else whole entries are read and cut.

    Args:
        home: where whole blocks are.
        share: what is wanted of each.
        profile: of the model that computed them.
    """

    def __init__(self, home: KVStore, share: Share, profile: ModelProfile) -> None:
        self.home = home
        self.share = share
        self._profile = profile
        layouts = (_layout(profile, 1, quantised) for quantised in (False, True))
        # Blocks of one length have one layout, and looking for its pieces takes milliseconds.
        self._pieces = lru_cache(_MOST_LAYOUTS)(share.pieces)
        self._head_bytes = max(layout.data_start for layout in layouts) + _IDS_BYTES

    def __repr__(self) -> str:
        heads = self.share.heads[0]
        return f"ShareStore({self.home!r}, heads={heads}, layers={self.share.layers})"

    def get(self, key: str) -> BlockKV | None:
        """The share of the entry, or None if there is none.

        Raises:
            CorruptEntryError: its header, its token ids or this share of it are damaged.
            FingerprintMismatchError: the block is of another shape than the model's.
            StoreError: as of the home.
        """
        (found,) = self.get_many([key])
        if isinstance(found, StoreError):
            raise found
        return found

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """As ``get`` for each key, asking the home once."""
        if not isinstance(self.home, RangeStore):
            return [self._cut(found) for found in get_many(self.home, keys)]
        parts = self.home.read_ranges(keys, self._places, self._head_bytes)
        return [self._decoded(part) if isinstance(part, EntryPart) else part for part in parts]

    def touch(self, key: str) -> bool:
        """As the home: whether there is an entry that looks sound, which is marked as used."""
        return touch(self.home, key)

    def put(self, key: str, kv: BlockKV) -> None:
        """Raises StoreError: whole blocks are put in the home."""
        self._refuse(f"store {key}")

    def delete(self, key: str) -> bool:
        """Raises StoreError: whole blocks are deleted in the home."""
        self._refuse(f"delete {key}")

    def __contains__(self, key: object) -> bool:
        return key in self.home

    def keys(self) -> Iterator[str]:
        """Those of the home."""
        return self.home.keys()

    def stats(self) -> StoreStats:
        """Those of the home: of whole entries."""
        return self.home.stats()

    def _refuse(self, what: str) -> NoReturn:
        raise StoreError(f"cannot {what} in {self!r}: it is only read; use {self.home!r} itself")

    def _places(self, header: Header) -> list[ByteRange]:
        """What is wanted of an entry: its token ids, and the share."""
        layout = header.layout
        expected = _layout(self._profile, layout.num_tokens, layout.quantised)
        if layout != expected or header.dtype != self._profile.torch_dtype:
            raise _other_shape(header.key)
        return [layout.place("token_ids"), *ranges_of(self._pieces(layout))]

    def _decoded(self, part: EntryPart) -> Found:
        try:
            pieces = self._pieces(part.header.layout)
            return decode_part(part.header, pieces, part.places, part.data)
        except FormatError as error:
            return CorruptEntryError(
                f"{part.source} is damaged: {error}; delete it, or put the block anew"
            )

    def _cut(self, found: Found) -> Found:
        if not isinstance(found, BlockKV):
            return found
        if found.token_outline != Share.of(self._profile).token_outline(self._profile):
            return _other_shape(found.key)
        return self.share.cut(found)


def _layout(profile: ModelProfile, num_tokens: int, quantised: bool) -> Layout:
    """Of the entries of a model's blocks."""
    dtype = torch.int8 if quantised else profile.torch_dtype
    shapes = (LayerShape(*layer[:3], dtype, dtype) for layer in profile.layers)
    return Layout(num_tokens, tuple(shapes), quantised)


def _other_shape(key: str) -> FingerprintMismatchError:
    return FingerprintMismatchError(
        f"the store holds under {key} keys and values of another shape or number type than the "
        "model's profile tells; is the profile that of the model which filled the store?"
    )
