"""Entries of format version 1: read to turn them into those of today, and for nothing else.

A safetensors file like today's, but with ``[layer][head][token][dim]``, one checksum of the whole
file, and a digest of text and template in which a sink and a correction cannot be seen.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import xxhash
from torch import Tensor

from blockattn_rag.kv.block_kv import BlockKV, token_digest
from blockattn_rag.store import checks
from blockattn_rag.store.header import MAGIC, FormatError
from blockattn_rag.store.layout import CHECKSUM_DIGITS, LENGTH_BYTES

_PREFIX = MAGIC + b'1","xxh3_128":"'
_CHECKSUM = slice(LENGTH_BYTES + len(_PREFIX), LENGTH_BYTES + len(_PREFIX) + CHECKSUM_DIGITS)
HEAD_BYTES = _CHECKSUM.start
"""By so many bytes an entry of this version is known."""


def is_version_1(start: bytes) -> bool:
    """Whether a file that starts so is an entry of version 1."""
    return start[LENGTH_BYTES:HEAD_BYTES] == _PREFIX


def decode(raw: Tensor) -> tuple[str, BlockKV]:
    """The key in version 1 of the entry in ``raw``, and the block as one that was encoded alone.

    Args:
        raw: uint8 ``[file size]``.

    Raises:
        FormatError: it is damaged, or no block's KV.
    """
    view = raw.numpy().data
    digest = xxhash.xxh3_128()
    for part in (view[:HEAD_BYTES], b"0" * CHECKSUM_DIGITS, view[_CHECKSUM.stop :]):
        digest.update(part)
    if digest.hexdigest().encode() != bytes(view[_CHECKSUM]):
        raise FormatError("its checksum is another than it says")
    end = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    try:
        fields: dict[str, Any] = json.loads(bytes(view[LENGTH_BYTES:end]))
        about = fields.pop("__metadata__")
        tensors = {name: _tensor(raw[end:], field) for name, field in fields.items()}
        token_ids = tensors["token_ids"].clone()
        kv = BlockKV(
            keys=_layers(tensors, "keys"),
            values=_layers(tensors, "values"),
            token_ids=token_ids,
            fingerprint=about["fingerprint"],
            digest=token_digest(token_ids.tolist()),
            handle=about["handle"],
        )
        checks.check_storable(kv)
        name = f"{about['fingerprint']}:{about['digest']}"
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise FormatError(f"it is no block's KV: {error!r:.200}") from error
    if token_ids.min() < 0 or not checks.is_finite(kv):
        raise FormatError("it holds NaN, infinity or negative token ids")
    return hashlib.sha256(name.encode()).hexdigest(), kv


def _tensor(data: Tensor, field: dict[str, Any]) -> Tensor:
    start, stop = field["data_offsets"]
    return data[start:stop].view(checks.DTYPES[field["dtype"]]).view(field["shape"])


def _layers(tensors: dict[str, Tensor], name: str) -> tuple[Tensor, ...]:
    if name in tensors:
        return tensors[name].unbind()
    count = sum(other.startswith(f"{name}.") for other in tensors)
    return tuple(tensors[f"{name}.{layer}"] for layer in range(count))
