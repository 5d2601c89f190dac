"""Header of an entry: encoding and parsing.

This module writes the header itself, because the safetensors library orders metadata at random. The
header's checksum must be at a fixed offset, so that it can be verified before anything is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import FileIO
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash

from blockattn_rag.kv.block_kv import store_key
from blockattn_rag.store import checks
from blockattn_rag.store.checks import TensorSpec
from blockattn_rag.store.layout import (
    CHECKSUM_DIGITS,
    KINDS,
    LENGTH_BYTES,
    Kind,
    LayerShape,
    Layout,
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
    """Raised for bytes that are not a complete, undamaged entry of this format version."""


class Header(NamedTuple):
    """Header of an entry.

    Args:
        dtype: Dtype of keys and values. In an int8 entry: their dtype before quantization.
        checksums: Checksums of the token ids and of ``layout.pieces()``, 32 digits each.
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
        """Store key of the entry."""
        return store_key(self.fingerprint, self.digest, self.namespace)

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the complete entry."""
        return self.layout.nbytes

    @property
    def kv_dtype(self) -> str:
        """``"int8"``, or ``"model"`` for keys and values as the model computes them."""
        return "int8" if self.layout.quantised else "model"


def read_header(file: BinaryIO | FileIO, size: int) -> Header:
    """Read the header of an entry of ``size`` bytes, and verify its checksum.

    Raises:
        FormatError: The file does not start with a header of this format version, or the header
            describes an entry of another size.
    """
    start = file.read(LENGTH_BYTES) or b""
    end = header_end(start)
    if end > size:
        raise FormatError("it ends within its header")
    return parse_header(start + (file.read(end - len(start)) or b""), size)


def parse_header(head: Buffer, size: int) -> Header:
    """Parse the first ``Layout.data_start`` bytes of an entry of ``size`` bytes.

    Raises:
        FormatError: See ``read_header``.
    """
    head = bytes(head)
    _check_version(head[: _CHECKSUM.start])
    found = head[_CHECKSUM]
    expected = checksum([head[: _CHECKSUM.start], _BLANK, head[_CHECKSUM.stop :]])
    if found != expected.encode():
        raise FormatError(
            f"the checksum of its header is {expected}, but the file contains "
            f"{found.decode(errors='backslashreplace')}"
        )
    try:
        header = _described(json.loads(head[LENGTH_BYTES:]))
        is_written_so = bytes(header_bytes(header)) == head
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"its header cannot be read: {error!r:.200}") from error
    if not is_written_so:
        raise FormatError("its header cannot be read: it is not in the canonical encoding")
    if header.nbytes != size:
        raise FormatError(f"its header describes {header.nbytes} bytes, found {size}")
    return header


def header_bytes(header: Header) -> bytearray:
    """Encode a header: length, JSON and padding."""
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
            "fingerprint, digest, handle and namespace may take about 700 bytes together"
        )
    content = bytearray(length.to_bytes(LENGTH_BYTES, "little") + head.ljust(length))
    content[_CHECKSUM] = checksum([content]).encode()
    return content


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def checksum(buffers: Sequence[Buffer]) -> str:
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def _check_version(start: bytes) -> None:
    """Raise FormatError for another version, or another kind of file."""
    start = start[LENGTH_BYTES:]
    if start == _PREFIX:
        return
    if not MAGIC.startswith(start[: len(MAGIC)]):
        raise FormatError(f"it does not start like a {FORMAT} entry")
    if len(start) < len(_PREFIX):
        raise FormatError("it ends within its header")
    version = start[len(MAGIC) :].split(b'"')[0].decode(errors="replace")
    raise FormatError(f"it has format version {version!r}; this package reads {str(VERSION)!r}")


def header_end(head: Buffer) -> int:
    """Number of bytes before the token ids.

    Raises:
        FormatError: The entry is too short, or the header too long.
    """
    if len(head) < LENGTH_BYTES:
        raise FormatError(f"found {len(head)} bytes, expected at least {LENGTH_BYTES}")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > _MOST_HEADER_BYTES:
        raise FormatError(
            f"found a header of {length} bytes, expected at most {_MOST_HEADER_BYTES}"
        )
    return LENGTH_BYTES + length


def _described(fields: dict[str, Any]) -> Header:
    """Build a header from its JSON fields. The caller checks the redundant fields."""
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
        raise ValueError(f"found {dtype}, expected a floating-point type")
    checksums = checks.check_text(about["checksums"])
    pieces = 1 + sum(len(KINDS) * layer.heads for layer in layers)
    if len(checksums) != CHECKSUM_DIGITS * pieces:
        raise ValueError(f"found {len(checksums)} checksum digits for {pieces} pieces")
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
    """Specs of the layers of keys or values, each ``[heads, tokens, size]``."""

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
            raise ValueError(f"found {layers} layers, expected at most {checks.MOST_LAYERS}")
        return [spec("", shape)] * layers
    found: list[TensorSpec] = []
    while (field := fields.get(f"head.0.{kind}.{len(found)}")) is not None:
        found.append(spec(f".{len(found)}", field["shape"]))
    return found


def _whole(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"found the size {number!r:.80}, expected a whole number")
    return number
