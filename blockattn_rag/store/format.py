"""Encoding of entries: safetensors files with a checksum of every byte.

Pure functions that convert a ``BlockKV`` to bytes and back; they open no files. ``docs/format.md``
is the specification. ``store.layout`` defines the byte layout, ``store.header`` the header. Stores
use ``encoded`` and ``decoded``, which check keys and name the place of an entry in errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.quantization import KVScales
from blockattn_rag.store import checks
from blockattn_rag.store.checks import TensorSpec
from blockattn_rag.store.header import (
    Buffer,
    FormatError,
    Header,
    checksum,
    header_bytes,
    header_end,
    parse_header,
)
from blockattn_rag.store.layout import (
    CHECKSUM_DIGITS,
    KINDS,
    ByteRange,
    Kind,
    Layout,
    Piece,
)


def encode(kv: BlockKV) -> list[memoryview]:
    """Encode an entry as buffers to write one after the other. CPU tensors are not copied.

    Raises:
        ValueError: Fingerprint, digest, handle and namespace are too long for a header.
    """
    kv = kv.to(torch.device("cpu"))
    layout = Layout.of(kv)
    ids = _bytes_of(kv.token_ids)
    # Sorted by offset below, because int8 entries have the scales of all layers first.
    parts: list[tuple[int, memoryview]] = []
    checksums = [checksum([ids])]
    for piece in layout.pieces():
        buffers = [_bytes_of(tensor) for tensor in _tensors_of(kv, piece)]
        checksums.append(checksum(buffers))
        parts += [(place.start, b) for place, b in zip(piece.ranges, buffers, strict=True)]
    dtype = kv.keys[0].dtype if kv.scales is None else kv.scales.dtype
    header = Header(
        fingerprint=kv.fingerprint,
        digest=kv.digest,
        handle=kv.handle,
        namespace=kv.namespace,
        dtype=dtype,
        layout=layout,
        checksums="".join(checksums),
    )
    head = memoryview(header_bytes(header))
    return [head, ids, *(buffer for _, buffer in sorted(parts, key=lambda part: part[0]))]


def decode(raw: Tensor) -> BlockKV:
    """Decode an entry. Keys and values are views of ``raw``.

    Each layer is ``[heads, tokens, dim]``, with contiguous heads. Contents are validated even if
    all checksums match, because a hostile writer can compute checksums.

    Args:
        raw: uint8 ``[size]``.

    Raises:
        FormatError: A byte was changed, removed or added, or the entry is malformed, or contains
            NaN, infinity or negative token ids.
    """
    view = raw.numpy().data
    header = parse_header(view[: header_end(view)], len(view))
    layout = header.layout
    token_ids = parse_token_ids(header, view[slice(*layout.place("token_ids"))])
    verify(header, layout.pieces(), [(0, view)])
    data = raw[layout.data_start :]
    for name, spec in layout.tensors.items():
        if spec.dtype.is_floating_point and not checks.all_finite(_typed(data, spec)):
            raise FormatError(f"its {name} contain NaN or infinity")
    named = ((kind, name) for kind in KINDS for name in layout.tensor_names(kind))
    kv = _block(header, token_ids, {n: _by_layer(data, layout, kind, n) for kind, n in named})
    if layout.quantised and not checks.is_finite(kv):
        raise FormatError(f"its scales are too large for {header.dtype}")
    return kv


def decode_part(
    header: Header, pieces: Sequence[Piece], places: Sequence[ByteRange], data: Tensor
) -> BlockKV:
    """Decode a part of an entry, some heads of some layers, as a block with the entry's key.

    Args:
        pieces: Pieces of the block, with the heads of each layer in order.
        places: Byte ranges that contain the token ids and the pieces.
        data: Concatenated bytes of ``places``, uint8. Keys and values may be views of it.

    Raises:
        FormatError: See ``decode``; only these bytes are checked.
    """
    layout, view, buffers = header.layout, data.numpy().data, []
    for start, stop in places:
        buffers.append((start, view[: stop - start]))
        view = view[stop - start :]
    offsets = [0, *itertools.accumulate(len(buffer) for _, buffer in buffers)]

    def within(place: ByteRange) -> int:
        """Offset in ``data`` of a byte range of the entry."""
        near = (n for n, (at, b) in enumerate(buffers) if at <= place.start < at + len(b))
        number = next(near)
        return offsets[number] + place.start - buffers[number][0]

    place = layout.place("token_ids")
    ids = data[within(place) :][: place.stop - place.start]
    token_ids = parse_token_ids(header, ids.numpy().data)
    verify(header, pieces, buffers)
    own: dict[tuple[int, Kind], list[Piece]] = {}
    for piece in pieces:
        own.setdefault((piece.layer, piece.kind), []).append(piece)
    by_name: dict[str, list[Tensor]] = {}
    for (layer, kind), heads in sorted(own.items()):
        for number, name in enumerate(layout.tensor_names(kind)):
            dtype, shape = layout.tensor_of(layout.layers[layer], kind, name)
            nbytes = math.prod(shape) * dtype.itemsize
            starts = [within(head.ranges[number]) for head in heads]
            specs = [TensorSpec(dtype, shape, start, start + nbytes) for start in starts]
            by_name.setdefault(name, []).append(_joined(data, specs))
    kv = _block(header, token_ids, by_name)
    if not checks.is_finite(kv):
        raise FormatError(f"its keys or values contain NaN or infinity in {header.dtype}")
    return kv


def parse_token_ids(header: Header, data: Buffer) -> Tensor:
    """Decode the token ids, int64 ``[tokens]``, from the bytes of ``layout.place("token_ids")``.

    Raises:
        FormatError: The token ids are damaged, or one is negative.
    """
    if checksum([data]) != header.checksums[:CHECKSUM_DIGITS]:
        raise FormatError("its token ids are damaged: their checksum does not match")
    # A copy: a view would keep all keys and values in memory after they moved to another device.
    token_ids = torch.frombuffer(bytearray(data), dtype=torch.int64)
    if token_ids.min() < 0:
        raise FormatError(f"found token id {int(token_ids.min())}, expected 0 or more")
    return token_ids


def verify(
    header: Header, pieces: Iterable[Piece], buffers: Sequence[tuple[int, memoryview]]
) -> None:
    """Check pieces by their checksums.

    Args:
        buffers: Bytes that contain the pieces, each with the offset of its first byte.

    Raises:
        FormatError: A piece is damaged. The message names its head and layer.
    """
    width = CHECKSUM_DIGITS
    for piece in pieces:
        number = 1 + header.layout.piece_numbers[piece[:3]]  # the token ids come first
        parts = []
        for start, stop in piece.ranges:
            at, buffer = next(b for b in buffers if b[0] <= start and stop <= b[0] + len(b[1]))
            parts.append(buffer[start - at : stop - at])
        if checksum(parts) != header.checksums[number * width : (number + 1) * width]:
            raise FormatError(
                f"the {piece.kind} of head {piece.head} in layer {piece.layer} are damaged: their "
                "checksum does not match"
            )


def check_found_under(key: str, entry: BlockKV | Header, place: object) -> None:
    """Raise FingerprintMismatchError if the entry at ``place``, under ``key``, has another key."""
    if entry.key != key:
        raise FingerprintMismatchError(
            f"{place} contains the entry of another text, model or tenant, whose key is "
            f"{entry.key} (fingerprint {entry.fingerprint!r}); delete it, or put the block again"
        )


def encoded(key: str, kv: BlockKV, place: object) -> list[memoryview]:
    """Encode an entry for ``place``, as buffers to write in order.

    Raises:
        ValueError: See ``KVStore.put``.
        StoreError: The block contains NaN or infinity.
    """
    checks.check_entry(key, kv)
    checks.check_finite(kv, place)
    return encode(kv)


def decoded(key: str, raw: Tensor, place: object) -> BlockKV:
    """Decode the entry of ``key`` from bytes read from ``place``, uint8 ``[size]``.

    Raises:
        CorruptEntryError: The bytes are damaged, or of another format version.
        FingerprintMismatchError: The bytes are the entry of another key.
    """
    with damage_reported(place):
        kv = decode(raw)
    check_found_under(key, kv, place)
    return kv


@contextmanager
def damage_reported(place: object) -> Iterator[None]:
    """Turn a FormatError into a CorruptEntryError that names the place of the entry."""
    try:
        yield
    except FormatError as error:
        raise CorruptEntryError(
            f"{place} is damaged: {error}; delete it, or put the block again"
        ) from error


# -- writing ---------------------------------------------------------------------------------------


def _tensors_of(kv: BlockKV, piece: Piece) -> list[Tensor]:
    """Tensors of a piece, in the order of its ranges."""
    of_keys = piece.kind == "keys"
    states = (kv.keys if of_keys else kv.values)[piece.layer][piece.head]
    if kv.scales is None:
        return [states]
    return [(kv.scales.keys if of_keys else kv.scales.values)[piece.layer][piece.head], states]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().flatten()  # a view, if the tensor is contiguous
    return flat.view(torch.uint8).numpy().data


# -- reading ---------------------------------------------------------------------------------------


def _by_layer(data: Tensor, layout: Layout, kind: Kind, name: str) -> tuple[Tensor, ...]:
    """Tensor ``[heads, …]`` of each layer, joined from the tensors of the heads."""
    if layout.is_stacked(kind):
        specs = [layout.tensors[f"head.{h}.{name}"] for h in range(layout.num_heads)]
        return _joined(data, specs).unbind(1)
    return tuple(
        _joined(data, [layout.tensors[f"head.{h}.{name}.{i}"] for h in range(layer.heads)])
        for i, layer in enumerate(layout.layers)
    )


def _block(header: Header, token_ids: Tensor, by_name: Mapping[str, Sequence[Tensor]]) -> BlockKV:
    """Build a block from its tensors by name and layer."""
    scales = None
    if header.layout.quantised:
        keys = tuple(scale.unsqueeze(1) for scale in by_name["key_scales"])
        values = tuple(scale.unsqueeze(2) for scale in by_name["value_scales"])
        scales = KVScales(keys, values, header.dtype)
    return BlockKV(
        keys=tuple(by_name["keys"]),
        values=tuple(by_name["values"]),
        token_ids=token_ids,
        fingerprint=header.fingerprint,
        digest=header.digest,
        handle=header.handle,
        scales=scales,
        namespace=header.namespace,
    )


def _joined(data: Tensor, specs: Sequence[TensorSpec]) -> Tensor:
    """Stack tensors of one shape to ``[tensors, …]``, as a view if they are evenly spaced."""
    first, width = specs[0], specs[0].dtype.itemsize
    step = specs[1].start - first.start if len(specs) > 1 else 0
    is_even = all(spec.start == first.start + n * step for n, spec in enumerate(specs))
    if not is_even or step % width or (data.storage_offset() + first.start) % width:
        return torch.stack([_typed(data, spec) for spec in specs])
    one = _typed(data, first)
    return one.as_strided((len(specs), *one.shape), (step // width, *one.stride()))


def _typed(data: Tensor, spec: TensorSpec) -> Tensor:
    """Read a tensor of the entry, as a view of its bytes or, if they are not aligned, a copy."""
    raw = data[spec.start : spec.stop]
    is_aligned = raw.storage_offset() % spec.dtype.itemsize == 0
    return (raw if is_aligned else raw.clone()).view(spec.dtype).view(spec.shape)
