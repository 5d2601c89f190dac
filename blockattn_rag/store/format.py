"""The bytes of one stored entry: a safetensors file whose every byte is under a checksum.

Pure functions from ``BlockKV`` to bytes and back; no paths, no files. ``docs/format.md`` is the
specification. The header is written here rather than by the safetensors library because the
library orders the metadata at random, and because the checksum must stand at a known place: the
check compares bytes, so that nothing has to be parsed before it is trusted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from blockattn_rag.kv import BlockKV

if TYPE_CHECKING:
    from collections.abc import Sequence

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

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class FormatError(ValueError):
    """The bytes are not a whole, undamaged entry of this format version; says why."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one tensor lies. ``start`` and ``stop`` count bytes from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What an entry says about itself. ``data_start`` counts bytes from the start of the file."""

    fingerprint: str
    digest: str
    handle: str
    num_tokens: int
    tensors: dict[str, TensorSpec]
    data_start: int


def encode(kv: BlockKV) -> list[memoryview]:
    """The entry as buffers to be written one after the other. Tensors on the CPU are not copied."""
    parts = _layout(kv)
    head = bytearray(_header(kv, parts))
    buffers = [memoryview(head), *(_bytes_of(piece) for part in parts for piece in part.pieces)]
    checksum = xxhash.xxh3_128()
    for buffer in buffers:
        checksum.update(buffer)
    head[_CHECKSUM] = checksum.hexdigest().encode()
    return buffers


def decode(raw: Tensor) -> BlockKV:
    """The entry in ``raw``, whose tensors are views of it.

    Args:
        raw: uint8 ``[file size]``, for example a memory-mapped file.

    Raises:
        FormatError: any byte differs from what was written, or is missing, or is one too many.
    """
    view = raw.numpy().data
    _check_version(bytes(view[: _CHECKSUM.start]))
    _check_checksum(view)
    header = _parse_header(bytes(view[: _header_end(view)]))
    try:
        tensors = {
            name: raw[header.data_start + spec.start : header.data_start + spec.stop]
            .view(spec.dtype)
            .view(spec.shape)
            for name, spec in header.tensors.items()
        }
        return BlockKV(
            keys=_layers(tensors, "keys"),
            values=_layers(tensors, "values"),
            token_ids=tensors["token_ids"],
            fingerprint=header.fingerprint,
            digest=header.digest,
            handle=header.handle,
        )
    except (KeyError, RuntimeError, TypeError) as error:
        raise FormatError(f"its header does not describe its data: {error}") from error


def read_header(file: BinaryIO, size: int) -> Header:
    """The header alone, of an entry of ``size`` bytes. The checksum is *not* checked.

    Raises:
        FormatError: the file does not start with a header of this format version.
    """
    start = file.read(_LENGTH_BYTES)
    end = _header_end(start)
    if end > size:
        raise FormatError("it ends within its header")
    return _parse_header(start + file.read(end - len(start)))


def check_storable(kv: BlockKV) -> None:
    """Refuse what is no block's KV.

    Raises:
        ValueError: no layers, no tokens, shapes that disagree, or a dtype that cannot be stored.
    """
    if not kv.keys or len(kv.keys) != len(kv.values):
        raise ValueError(
            f"a BlockKV needs as many key as value layers, at least one; "
            f"found {len(kv.keys)} and {len(kv.values)}"
        )
    ids = kv.token_ids
    if ids.ndim != 1 or ids.dtype != torch.int64 or not len(ids):
        raise ValueError(
            f"token_ids must be int64 [num_tokens], num_tokens >= 1; "
            f"found {ids.dtype} {list(ids.shape)}"
        )
    for layer in (*kv.keys, *kv.values):
        if layer.ndim != 3 or layer.shape[1] != len(ids) or not layer.numel():
            raise ValueError(
                f"keys and values must be [num_kv_heads, {len(ids)} tokens, head_dim] and not "
                f"empty; found {list(layer.shape)}"
            )
        if layer.dtype not in _DTYPE_NAMES:
            raise ValueError(f"safetensors cannot hold {layer.dtype}")


class _Part(NamedTuple):
    """One tensor of the file, and the tensors whose bytes make it up."""

    name: str
    shape: list[int]
    pieces: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() * piece.element_size() for piece in self.pieces)


def _layout(kv: BlockKV) -> list[_Part]:
    """The tensors in file order.

    One stacked tensor for the keys of all layers and one for the values where the layers agree
    (nearly every model): two header entries to parse instead of two per layer. Wider elements
    come first, so that every tensor starts at a multiple of its element size.
    """
    parts = [_Part("token_ids", [kv.num_tokens], [kv.token_ids])]
    for name, layers in (("keys", kv.keys), ("values", kv.values)):
        if len({(layer.shape, layer.dtype) for layer in layers}) == 1:
            parts.append(_Part(name, [len(layers), *layers[0].shape], layers))
        else:
            parts += [_Part(f"{name}.{i}", [*x.shape], [x]) for i, x in enumerate(layers)]
    return sorted(parts, key=lambda part: -part.pieces[0].element_size())


def _header(kv: BlockKV, parts: Sequence[_Part]) -> bytes:
    """Length, JSON and padding, with a blank checksum."""
    about = {"fingerprint": kv.fingerprint, "digest": kv.digest, "handle": kv.handle}
    fields: dict[str, object] = {}
    offset = 0
    for part in parts:
        fields[part.name] = {
            "dtype": _DTYPE_NAMES[part.pieces[0].dtype],
            "shape": part.shape,
            "data_offsets": [offset, offset + part.nbytes],
        }
        offset += part.nbytes
    head = _PREFIX + _BLANK + b'",' + _json(about)[1:] + b"," + _json(fields)[1:]
    before_keys = _LENGTH_BYTES + len(head) + parts[0].nbytes
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
    return _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little")


def _parse_header(head: bytes) -> Header:
    """From the first ``_header_end`` bytes of an entry."""
    _check_version(head)
    try:
        fields: dict[str, Any] = json.loads(head[_LENGTH_BYTES:])
        about = fields.pop("__metadata__")
        return Header(
            fingerprint=about["fingerprint"],
            digest=about["digest"],
            handle=about["handle"],
            num_tokens=fields["token_ids"]["shape"][0],
            tensors={
                name: TensorSpec(
                    _DTYPES[spec["dtype"]], tuple(spec["shape"]), *spec["data_offsets"]
                )
                for name, spec in fields.items()
            },
            data_start=len(head),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"its header cannot be read: {error!r}") from error


def _layers(tensors: dict[str, Tensor], name: str) -> tuple[Tensor, ...]:
    if name in tensors:
        return tensors[name].unbind(0)
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
