"""The bytes of one stored entry: a safetensors file whose every byte is under a checksum.

Pure functions from ``BlockKV`` to bytes and back; no paths, no files. ``docs/format.md`` is the
specification. The header is written here rather than by the safetensors library because the
library orders the metadata at random, and because the checksum must stand at a known place: the
check compares bytes, so that nothing has to be parsed before it is trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from io import FileIO
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import checks

FORMAT = "blockattn_rag.kv"
VERSION = 1

ALIGNMENT = 64
"""Keys start at a multiple of this many bytes: a cache line, and the widest vector load."""

_MAGIC = f'{{"__metadata__":{{"format":"{FORMAT}","version":"'.encode()
_PREFIX = _MAGIC + f'{VERSION}","xxh3_128":"'.encode()
_LENGTH_BYTES = 8
_CHECKSUM_DIGITS = 32
_CHECKSUM = slice(_LENGTH_BYTES + len(_PREFIX), _LENGTH_BYTES + len(_PREFIX) + _CHECKSUM_DIGITS)
_BLANK = b"0" * _CHECKSUM_DIGITS

_MOST_HEADER_BYTES = 1 << 20

Layer = TypeVar("Layer", Tensor, checks.TensorSpec)


class FormatError(ValueError):
    """The bytes are not a whole, undamaged entry of this format version; says why."""


class Header(NamedTuple):
    """What an entry says about itself; that of a block's KV, whole and without gaps.

    ``data_start`` and ``nbytes`` count from the start of the file, to the data and to the end.
    """

    fingerprint: str
    digest: str
    handle: str
    tensors: dict[str, checks.TensorSpec]
    data_start: int

    @property
    def num_tokens(self) -> int:
        return self.tensors["token_ids"].shape[0]

    @property
    def nbytes(self) -> int:
        return self.data_start + max(spec.stop for spec in self.tensors.values())


def encode(kv: BlockKV) -> list[memoryview]:
    """The entry as buffers to be written one after the other. Tensors on the CPU are not copied."""
    parts = _layout(kv)
    head = bytearray(_header(kv, parts))
    buffers = [memoryview(head)]
    buffers += (_bytes_of(piece) for pieces in parts.values() for piece in pieces)
    checksum = xxhash.xxh3_128()
    for buffer in buffers:
        checksum.update(buffer)
    head[_CHECKSUM] = checksum.hexdigest().encode()
    return buffers


def decode(raw: Tensor) -> BlockKV:
    """The entry in ``raw``, whose keys and values are views of it.

    A right checksum is not taken for a right entry: whoever writes a wrong one can compute it.

    Args:
        raw: uint8 ``[file size]``.

    Raises:
        FormatError: any byte differs from what was written, or is missing, or is one too many; or
            what was written is no block's KV, or holds NaN, infinity or negative token ids.
    """
    view = raw.numpy().data
    _check_version(bytes(view[: _CHECKSUM.start]))
    _check_checksum(view)
    header = _parse_header(bytes(view[: _header_end(view)]), len(view))
    data = raw[header.data_start :]
    try:
        tensors = {
            name: data[spec.start : spec.stop].view(spec.dtype).view(spec.shape)
            for name, spec in header.tensors.items()
        }
    except RuntimeError as error:  # not aligned to its element size
        raise FormatError(f"its header does not describe its data: {error}") from error
    # Of its own: a few bytes that stay here must not hold states that went to another device.
    token_ids = tensors.pop("token_ids").clone()
    if token_ids.min() < 0:
        raise FormatError(f"it holds the token id {int(token_ids.min())}")
    for name, tensor in tensors.items():
        if not checks.all_finite(tensor):
            raise FormatError(f"its {name} hold NaN or infinity")
    return BlockKV(
        keys=_layers(tensors, "keys"),
        values=_layers(tensors, "values"),
        token_ids=token_ids,
        fingerprint=header.fingerprint,
        digest=header.digest,
        handle=header.handle,
    )


def read_header(file: BinaryIO | FileIO, size: int) -> Header:
    """The header alone, of an entry of ``size`` bytes. The checksum is *not* checked.

    Raises:
        FormatError: the file does not start with a header of this format version, or its size is
            another than the header says.
    """
    start = file.read(_LENGTH_BYTES) or b""
    end = _header_end(start)
    if end > size:
        raise FormatError("it ends within its header")
    return _parse_header(start + (file.read(end - len(start)) or b""), size)


def _layout(kv: BlockKV) -> dict[str, Sequence[Tensor]]:
    """The tensors of the file in their order; of each, the tensors whose bytes make it up.

    One stacked tensor for the keys of all layers and one for the values where the layers agree
    (nearly every model): two header entries to parse instead of two per layer. Wider elements
    come first, so that every tensor starts at a multiple of its element size.
    """
    parts: dict[str, Sequence[Tensor]] = {"token_ids": [kv.token_ids]}
    for name, layers in (("keys", kv.keys), ("values", kv.values)):
        if len({(layer.shape, layer.dtype) for layer in layers}) == 1:
            parts[name] = layers
        else:
            parts |= {f"{name}.{i}": [layer] for i, layer in enumerate(layers)}
    return dict(sorted(parts.items(), key=lambda part: -part[1][0].element_size()))


def _header(kv: BlockKV, parts: Mapping[str, Sequence[Tensor]]) -> bytes:
    """Length, JSON and padding, with a blank checksum."""
    about = {"fingerprint": kv.fingerprint, "digest": kv.digest, "handle": kv.handle}
    fields: dict[str, object] = {}
    start = 0
    for name, pieces in parts.items():
        stop = start + sum(piece.nbytes for piece in pieces)
        stacked = [len(pieces)] if name in ("keys", "values") else []
        fields[name] = {
            "dtype": checks.DTYPE_NAMES[pieces[0].dtype],
            "shape": [*stacked, *pieces[0].shape],
            "data_offsets": [start, stop],
        }
        start = stop
    head = _PREFIX + _BLANK + b'",' + _json(about)[1:] + b"," + _json(fields)[1:]
    before_keys = _LENGTH_BYTES + len(head) + kv.token_ids.nbytes
    head += b" " * (-before_keys % ALIGNMENT)
    return len(head).to_bytes(_LENGTH_BYTES, "little") + head


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().flatten()  # a view, if the tensor is contiguous
    return flat.view(torch.uint8).numpy().data


def _header_end(head: bytes | memoryview) -> int:
    """Bytes up to the first tensor's."""
    if len(head) < _LENGTH_BYTES:
        raise FormatError(f"{len(head)} bytes are too few for an entry")
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if length > _MOST_HEADER_BYTES:
        raise FormatError(f"its header would have {length} bytes")
    return _LENGTH_BYTES + length


def _parse_header(head: bytes, size: int) -> Header:
    """From the first ``_header_end`` bytes of an entry of ``size`` bytes."""
    _check_version(head)
    try:
        fields: dict[str, Any] = json.loads(head[_LENGTH_BYTES:])
        about = fields.pop("__metadata__")
        header = Header(
            fingerprint=checks.check_text(about["fingerprint"]),
            digest=checks.check_text(about["digest"]),
            handle=checks.check_text(about["handle"]),
            tensors={name: _spec(field) for name, field in fields.items()},
            data_start=len(head),
        )
        _check_tensors(header.tensors)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"its header cannot be read: {error!r}") from error
    if header.nbytes != size:
        raise FormatError(f"its header tells of {header.nbytes} bytes, it has {size}")
    return header


def _spec(field: dict[str, Any]) -> checks.TensorSpec:
    dtype, shape = checks.DTYPES[field["dtype"]], tuple(_whole(n) for n in field["shape"])
    start, stop = (_whole(n) for n in field["data_offsets"])
    if stop - start != math.prod(shape) * dtype.itemsize or start == stop:
        raise ValueError(f"{dtype} {list(shape)} does not take bytes {start} to {stop}")
    return checks.TensorSpec(dtype, shape, start, stop)


def _whole(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"found {number!r:.80} for a size")
    return number


def _check_tensors(tensors: dict[str, checks.TensorSpec]) -> None:
    """The tensors of one block's KV and no others, one after the other without gaps."""
    end = 0
    for name, spec in sorted(tensors.items(), key=lambda item: item[1].start):
        if spec.start != end:
            raise ValueError(f"{name} starts at byte {spec.start}, expected {end}")
        end = spec.stop
        if name in ("keys", "values") and not (
            len(spec.shape) == 4 and spec.shape[0] <= checks.MOST_LAYERS
        ):
            raise ValueError(f"{name} must be [layers, heads, tokens, size], is {list(spec.shape)}")
    keys, values = _layers(tensors, "keys"), _layers(tensors, "values")
    known = 1 + sum(1 if n in tensors else len(s) for n, s in (("keys", keys), ("values", values)))
    if len(tensors) != known:
        raise ValueError(f"found the tensors {sorted(tensors)}"[:200])
    checks.check_states(tensors["token_ids"], keys, values)


def _layers(tensors: Mapping[str, Layer], name: str) -> tuple[Layer, ...]:
    """The keys or values of each layer, from one stacked tensor or from one each."""
    if name in tensors:
        return tensors[name].unbind()
    count = sum(key.startswith(f"{name}.") for key in tensors)
    return tuple(tensors[f"{name}.{i}"] for i in range(count))


def _check_version(head: bytes) -> None:
    """Name another version as such, rather than as a wrong checksum."""
    start = head[_LENGTH_BYTES : _CHECKSUM.start]
    if start == _PREFIX:
        return
    if len(start) < len(_PREFIX):
        raise FormatError("it ends within its header")
    if not start.startswith(_MAGIC):
        raise FormatError(f"it does not start as a {FORMAT} entry")
    version = start[len(_MAGIC) :].split(b'"')[0].decode(errors="replace")
    raise FormatError(f"it has format version {version!r}; this package reads {str(VERSION)!r}")


def _check_checksum(view: memoryview) -> None:
    checksum = xxhash.xxh3_128()
    checksum.update(view[: _CHECKSUM.start])
    checksum.update(_BLANK)
    checksum.update(view[_CHECKSUM.stop :])
    found, expected = bytes(view[_CHECKSUM]), checksum.hexdigest().encode()
    if found != expected:
        raise FormatError(
            f"the checksum of its {len(view)} bytes is {expected.decode()}, "
            f"the file says {found.decode(errors='backslashreplace')}"
        )
