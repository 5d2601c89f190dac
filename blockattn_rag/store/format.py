"""The bytes of one stored entry: a safetensors file whose every byte is under a checksum.

Pure functions from ``BlockKV`` to bytes and back; no paths, no files. ``docs/format.md`` is the
specification, ``store.layout`` says where everything lies. The header is written here rather than
by the safetensors library because the library orders the metadata at random, and because the
header's checksum must stand at a known place: the check compares bytes, so that nothing has to be
parsed before it is trusted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from io import FileIO
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from blockattn_rag.kv.block_kv import BlockKV, store_key
from blockattn_rag.kv.quantization import KVScales
from blockattn_rag.store import checks
from blockattn_rag.store.checks import TensorSpec
from blockattn_rag.store.layout import (
    CHECKSUM_DIGITS,
    KINDS,
    LENGTH_BYTES,
    Kind,
    LayerShape,
    Layout,
    Piece,
    ranges,
)

FORMAT = "blockattn_rag.kv"
VERSION = 2

MAGIC = f'{{"__metadata__":{{"format":"{FORMAT}","version":"'.encode()
_PREFIX = MAGIC + f'{VERSION}","xxh3_128":"'.encode()
_CHECKSUM = slice(LENGTH_BYTES + len(_PREFIX), LENGTH_BYTES + len(_PREFIX) + CHECKSUM_DIGITS)
_BLANK = b"0" * CHECKSUM_DIGITS

_MOST_HEADER_BYTES = 1 << 22

Buffer = bytes | bytearray | memoryview


class FormatError(ValueError):
    """The bytes are not a whole, undamaged entry of this format version; says why."""


class Header(NamedTuple):
    """What an entry says about itself.

    ``dtype``: of keys and values, in an int8 entry of those that were quantised. ``checksums``:
    of the token ids, then of ``layout.pieces()``, 32 digits each.
    """

    fingerprint: str
    digest: str
    handle: str
    namespace: str
    dtype: torch.dtype
    layout: Layout
    checksums: str

    @property
    def key(self) -> str:
        """Where a store holds this entry."""
        return store_key(self.fingerprint, self.digest, self.namespace)

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    @property
    def nbytes(self) -> int:
        """Of the whole entry."""
        return self.layout.nbytes

    @property
    def kv_dtype(self) -> str:
        """``"int8"``, or ``"model"`` for keys and values as the model computes them."""
        return "int8" if self.layout.quantised else "model"


def encode(kv: BlockKV) -> list[memoryview]:
    """The entry as buffers to be written one after the other. Tensors on the CPU are not copied.

    Raises:
        ValueError: fingerprint, digest, handle and namespace are too long for a header.
    """
    kv = kv.to(torch.device("cpu"))
    layout = Layout.of(kv)
    ids = _bytes_of(kv.token_ids)
    # The bytes by piece, and by place: of int8 entries, scales of all layers precede the numbers.
    parts: list[tuple[int, memoryview]] = []
    checksums = [_checksum([ids])]
    for piece in layout.pieces():
        buffers = [_bytes_of(tensor) for tensor in _tensors_of(kv, piece)]
        checksums.append(_checksum(buffers))
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
    head = memoryview(_header_bytes(header))
    return [head, ids, *(buffer for _, buffer in sorted(parts, key=lambda part: part[0]))]


def decode(raw: Tensor) -> BlockKV:
    """The entry in ``raw``, whose keys and values are views of it.

    A layer's heads lie apart: ``[heads, tokens, dim]`` of which each head is contiguous. A right
    checksum is not taken for a right entry: whoever writes a wrong one can compute it.

    Args:
        raw: uint8 ``[file size]``.

    Raises:
        FormatError: any byte differs from what was written, or is missing, or is one too many; or
            what was written is no block's KV, or holds NaN, infinity or negative token ids.
    """
    view = raw.numpy().data
    header = parse_header(view[: _header_end(view)], len(view))
    layout = header.layout
    token_ids = parse_token_ids(header, view[slice(*layout.place("token_ids"))])
    verify(header, layout.pieces(), [(0, view)])
    data = raw[layout.data_start :]
    for name, spec in layout.tensors.items():
        if spec.dtype.is_floating_point and not checks.all_finite(_typed(data, spec)):
            raise FormatError(f"its {name} hold NaN or infinity")
    kv = BlockKV(
        keys=_by_layer(data, layout, "keys", "keys"),
        values=_by_layer(data, layout, "values", "values"),
        token_ids=token_ids,
        fingerprint=header.fingerprint,
        digest=header.digest,
        handle=header.handle,
        scales=_scales(data, header) if layout.quantised else None,
        namespace=header.namespace,
    )
    if layout.quantised and not checks.is_finite(kv):
        raise FormatError(f"its scales are too large for {header.dtype}")
    return kv


def read_header(file: BinaryIO | FileIO, size: int) -> Header:
    """The header alone, checked by its own checksum, of an entry of ``size`` bytes.

    Raises:
        FormatError: the file does not start with a header of this format version, or its size is
            another than the header says.
    """
    start = file.read(LENGTH_BYTES) or b""
    end = _header_end(start)
    if end > size:
        raise FormatError("it ends within its header")
    return parse_header(start + (file.read(end - len(start)) or b""), size)


def parse_header(head: Buffer, size: int) -> Header:
    """The header in the first ``Layout.data_start`` bytes of an entry of ``size`` bytes.

    Raises as ``read_header``.
    """
    head = bytes(head)
    _check_version(head[: _CHECKSUM.start])
    found = head[_CHECKSUM]
    expected = _checksum([head[: _CHECKSUM.start], _BLANK, head[_CHECKSUM.stop :]])
    if found != expected.encode():
        raise FormatError(
            f"the checksum of its header is {expected}, the file says "
            f"{found.decode(errors='backslashreplace')}"
        )
    try:
        header = _described(json.loads(head[LENGTH_BYTES:]))
        is_written_so = bytes(_header_bytes(header)) == head
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"its header cannot be read: {error!r:.200}") from error
    if not is_written_so:
        raise FormatError("its header cannot be read: it is not as this format writes it")
    if header.nbytes != size:
        raise FormatError(f"its header tells of {header.nbytes} bytes, it has {size}")
    return header


def parse_token_ids(header: Header, data: Buffer) -> Tensor:
    """The token ids, int64 ``[tokens]``, from the bytes of ``layout.place("token_ids")``.

    Raises:
        FormatError: they are damaged, or one is negative.
    """
    if _checksum([data]) != header.checksums[:CHECKSUM_DIGITS]:
        raise FormatError("its token ids are damaged: their checksum is another")
    # Of their own: a few bytes that stay must not hold states that went to another device.
    token_ids = torch.frombuffer(bytearray(data), dtype=torch.int64)
    if token_ids.min() < 0:
        raise FormatError(f"it holds the token id {int(token_ids.min())}")
    return token_ids


def verify_range(
    header: Header,
    data: Sequence[Buffer],
    *,
    heads: Collection[int] | None = None,
    layers: Collection[int] | None = None,
) -> None:
    """Check the bytes of some heads and layers alone; of nothing else any is looked at.

    Args:
        header: of the entry.
        data: the bytes of ``layout.ranges(header.layout, heads, layers)``, in order.

    Raises:
        FormatError: they are not as they were written; says which head and layer is damaged.
        ValueError: they are not as many bytes as these ranges.
    """
    places = ranges(header.layout, heads, layers)
    if [p.stop - p.start for p in places] != [len(part) for part in data]:
        raise ValueError(f"expected the bytes of {places}, found {[len(part) for part in data]}")
    buffers = [(p.start, memoryview(part)) for p, part in zip(places, data, strict=True)]
    verify(header, header.layout.pieces(heads, layers), buffers)


def verify(
    header: Header, pieces: Iterator[Piece], buffers: Sequence[tuple[int, memoryview]]
) -> None:
    """``verify_range`` of ``pieces``; ``buffers`` hold them, with the place of their first byte."""
    width = CHECKSUM_DIGITS
    numbers = {piece[:3]: n for n, piece in enumerate(header.layout.pieces(), start=1)}
    for piece in pieces:
        number = numbers[piece[:3]]
        parts = []
        for start, stop in piece.ranges:
            at, buffer = next(b for b in buffers if b[0] <= start and stop <= b[0] + len(b[1]))
            parts.append(buffer[start - at : stop - at])
        if _checksum(parts) != header.checksums[number * width : (number + 1) * width]:
            raise FormatError(
                f"the {piece.kind} of head {piece.head} in layer {piece.layer} are damaged: their "
                "checksum is another"
            )


# -- writing ---------------------------------------------------------------------------------------


def _tensors_of(kv: BlockKV, piece: Piece) -> list[Tensor]:
    """What a piece is made of, in the order of its ranges."""
    of_keys = piece.kind == "keys"
    states = (kv.keys if of_keys else kv.values)[piece.layer][piece.head]
    if kv.scales is None:
        return [states]
    return [(kv.scales.keys if of_keys else kv.scales.values)[piece.layer][piece.head], states]


def _header_bytes(header: Header) -> bytearray:
    """Length, JSON and padding."""
    layout = header.layout
    about = {
        "fingerprint": header.fingerprint,
        "digest": header.digest,
        "handle": header.handle,
        "namespace": header.namespace,
        "kv_dtype": header.kv_dtype,
        "dtype": checks.DTYPE_NAMES[header.dtype],
        "checksums": header.checksums,
    }
    fields = {
        name: {
            "dtype": checks.DTYPE_NAMES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [spec.start, spec.stop],
        }
        for name, spec in layout.tensors.items()
    }
    head = _PREFIX + _BLANK + b'",' + _json(about)[1:] + b"," + _json(fields)[1:]
    length = layout.data_start - LENGTH_BYTES
    if len(head) > length or length > _MOST_HEADER_BYTES:
        raise ValueError(
            f"a header of {len(head)} bytes does not fit in {min(length, _MOST_HEADER_BYTES)}: "
            "fingerprint, digest, handle and namespace may take some 700 bytes together"
        )
    content = bytearray(length.to_bytes(LENGTH_BYTES, "little") + head.ljust(length))
    content[_CHECKSUM] = _checksum([content]).encode()
    return content


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().flatten()  # a view, if the tensor is contiguous
    return flat.view(torch.uint8).numpy().data


def _checksum(buffers: Sequence[Buffer]) -> str:
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


# -- reading ---------------------------------------------------------------------------------------


def _check_version(start: bytes) -> None:
    """Tell a damaged entry from another version and from another kind of file."""
    start = start[LENGTH_BYTES:]
    if start == _PREFIX:
        return
    if not MAGIC.startswith(start[: len(MAGIC)]):
        raise FormatError(f"it does not start as a {FORMAT} entry")
    if len(start) < len(_PREFIX):
        raise FormatError("it ends within its header")
    version = start[len(MAGIC) :].split(b'"')[0].decode(errors="replace")
    advice = " (blockattn-rag store migrate turns it into one)" if version == "1" else ""
    raise FormatError(
        f"it has format version {version!r}; this package reads {str(VERSION)!r}{advice}"
    )


def _header_end(head: Buffer) -> int:
    """Bytes up to the token ids."""
    if len(head) < LENGTH_BYTES:
        raise FormatError(f"{len(head)} bytes are too few for an entry")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > _MOST_HEADER_BYTES:
        raise FormatError(f"its header would have {length} bytes")
    return LENGTH_BYTES + length


def _described(fields: dict[str, Any]) -> Header:
    """What the fields of a header say, if they are those of a block's KV. What follows from it is
    not compared with the fields here."""
    about = fields["__metadata__"]
    num_tokens = _whole(fields["token_ids"]["shape"][0])
    keys, values = (_layer_specs(fields, kind, num_tokens) for kind in KINDS)
    quantised = about["kv_dtype"] == "int8"
    ids = TensorSpec(torch.int64, (num_tokens,), 0, 0)
    checks.check_states(ids, keys, values, quantised=quantised)
    layers = tuple(
        LayerShape(k.shape[0], k.shape[2], v.shape[2], k.dtype, v.dtype)
        for k, v in zip(keys, values, strict=True)
    )
    dtype = checks.DTYPES[about["dtype"]] if quantised else keys[0].dtype
    if not dtype.is_floating_point:
        raise ValueError(f"{dtype} is no floating-point type")
    checksums = checks.check_text(about["checksums"])
    pieces = 1 + sum(len(KINDS) * layer.heads for layer in layers)
    if len(checksums) != CHECKSUM_DIGITS * pieces:
        raise ValueError(f"found {len(checksums)} digits of checksums for {pieces} pieces")
    return Header(
        fingerprint=checks.check_text(about["fingerprint"]),
        digest=checks.check_text(about["digest"]),
        handle=checks.check_text(about["handle"]),
        namespace=checks.check_text(about["namespace"]),
        dtype=dtype,
        layout=Layout(num_tokens, layers, quantised),
        checksums=checksums,
    )


def _layer_specs(fields: dict[str, Any], kind: Kind, num_tokens: int) -> list[TensorSpec]:
    """The layers of a block's keys or values, ``[heads, tokens, size]``."""

    def heads(suffix: str) -> int:
        count = 0
        while f"head.{count}.{kind}{suffix}" in fields:
            count += 1
        return count

    def spec(suffix: str, shape: Sequence[object]) -> TensorSpec:
        dtype = checks.DTYPES[fields[f"head.0.{kind}{suffix}"]["dtype"]]
        size = _whole(shape[-1])
        return TensorSpec(dtype, (heads(suffix), num_tokens, size), 0, 0)

    if f"head.0.{kind}" in fields:
        shape = fields[f"head.0.{kind}"]["shape"]
        layers = _whole(shape[0])
        if layers > checks.MOST_LAYERS:
            raise ValueError(f"{layers} layers are more than {checks.MOST_LAYERS}")
        return [spec("", shape)] * layers
    found: list[TensorSpec] = []
    while (field := fields.get(f"head.0.{kind}.{len(found)}")) is not None:
        found.append(spec(f".{len(found)}", field["shape"]))
    return found


def _whole(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"found {number!r:.80} for a size")
    return number


def _by_layer(data: Tensor, layout: Layout, kind: Kind, name: str) -> tuple[Tensor, ...]:
    """Per layer, the heads' tensors of that name as one: ``[heads, …]``."""
    if layout.is_stacked(kind):
        specs = [layout.tensors[f"head.{h}.{name}"] for h in range(layout.num_heads)]
        return _joined(data, specs).unbind(1)
    return tuple(
        _joined(data, [layout.tensors[f"head.{h}.{name}.{i}"] for h in range(layer.heads)])
        for i, layer in enumerate(layout.layers)
    )


def _scales(data: Tensor, header: Header) -> KVScales:
    keys = _by_layer(data, header.layout, "keys", "key_scales")
    values = _by_layer(data, header.layout, "values", "value_scales")
    return KVScales(
        tuple(scale.unsqueeze(1) for scale in keys),
        tuple(scale.unsqueeze(2) for scale in values),
        header.dtype,
    )


def _joined(data: Tensor, specs: Sequence[TensorSpec]) -> Tensor:
    """Tensors of one shape as one ``[tensors, …]``: a view where they lie equally far apart."""
    first, width = specs[0], specs[0].dtype.itemsize
    step = specs[1].start - first.start if len(specs) > 1 else 0
    is_even = all(spec.start == first.start + n * step for n, spec in enumerate(specs))
    if not is_even or step % width or (data.storage_offset() + first.start) % width:
        return torch.stack([_typed(data, spec) for spec in specs])
    one = _typed(data, first)
    return one.as_strided((len(specs), *one.shape), (step // width, *one.stride()))


def _typed(data: Tensor, spec: TensorSpec) -> Tensor:
    """A tensor of the entry: a view of its bytes, or a copy where they lie crooked in memory."""
    raw = data[spec.start : spec.stop]
    crooked = raw.storage_offset() % spec.dtype.itemsize
    return (raw.clone() if crooked else raw).view(spec.dtype).view(spec.shape)
