"""Header of an entry: metadata, and the layout and locations of its tensors (``docs/format.md``).

Layers of equal shape and dtype form a group. Each head of a group has its own tensors of keys and
values (and scales), so that a tensor-parallel rank reads complete tensors and can verify them.

Entries are written with the safetensors library. It can read metadata and single tensors only from
local files, so headers are parsed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash

from blockattn_rag.kv.block_kv import BlockKV, store_key
from blockattn_rag.store import checks
from blockattn_rag.store.checks import TensorSpec

FORMAT = "blockattn_rag.kv"
VERSION = 3
TOKEN_IDS = "token_ids"

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 1 << 22
_MOST_TEXT_BYTES = 1024
_TEXTS = ("fingerprint", "digest", "handle", "namespace")
_HEADER = "header"  # Metadata field with the checksum of the header.

Buffer = bytes | bytearray | memoryview


class FormatError(ValueError):
    """Damaged entry, or an entry in another format version. Messages complete "... is damaged:"."""


class LayerShape(NamedTuple):
    """Shape of a layer: number of key-value heads, head sizes, and stored dtypes."""

    heads: int
    key_size: int
    value_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype


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
        scales = ("key_scales", "value_scales") if self.quantized else ()
        return ("keys", "values", *scales)

    @cached_property
    def groups(self) -> tuple[tuple[LayerShape, tuple[int, ...]], ...]:
        """Shape and layer indices of each group, ordered by first layer."""
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(self.layers):
            groups.setdefault(shape, []).append(layer)
        return tuple((shape, tuple(layers)) for shape, layers in groups.items())

    @cached_property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
        tensors = {TOKEN_IDS: (torch.int64, (self.num_tokens,))}
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
                tensors |= {tensor_name(head, kind, number): specs[kind] for kind in self.kinds}
        return tensors

    @property
    def most_header_bytes(self) -> int:
        """Upper bound of the header size, including the length field, for any number of tokens."""
        return 3072 + 8 * len(self.layers) + 256 * len(self.tensors)


def tensor_name(head: int, kind: str, group: int) -> str:
    """Return a tensor's name. Safetensors sorts by dtype and name, so heads are stored in order."""
    return f"head.{head:04}.{kind}.{group:02}"


def share_of(rank: int, ranks: int, count: int) -> range:
    """Return which of ``count`` heads or layers belong to a rank, as a range of indices.

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


class Header(NamedTuple):
    """Parsed metadata of an entry, and the layout, byte ranges and checksums of its tensors."""

    fingerprint: str
    digest: str
    handle: str
    namespace: str
    dtype: torch.dtype  # Of the first layer's keys; in an int8 entry, before quantization.
    layout: Layout
    places: Mapping[str, TensorSpec]  # By tensor name, like the checksums.
    checksums: Mapping[str, str]

    @property
    def key(self) -> str:
        return store_key(self.fingerprint, self.digest, self.namespace)

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    @property
    def kv_dtype(self) -> str:
        """``"int8"``, or ``"model"`` for unquantized keys and values."""
        return "int8" if self.layout.quantized else "model"


def read_header(file: BinaryIO | FileIO, size: int) -> Header:
    start = file.read(_LENGTH_BYTES) or b""
    return parse_header(start + (file.read(header_end(start) - len(start)) or b""), size)


def header_end(head: Buffer) -> int:
    """Return the number of bytes before the tensors, given the entry's first bytes."""
    if len(head) < _LENGTH_BYTES:
        raise FormatError(f"found {len(head)} bytes, expected at least {_LENGTH_BYTES}")
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if length > _MOST_HEADER_BYTES:
        raise FormatError(
            f"found a header of {length} bytes, expected at most {_MOST_HEADER_BYTES}"
        )
    return _LENGTH_BYTES + length


def parse_header(head: Buffer, size: int) -> Header:
    """Parse and verify the header of an entry of ``size`` bytes, given its first bytes."""
    if len(head) < (end := header_end(head)):
        raise FormatError("it ends within its header")
    try:
        fields = json.loads(bytes(head[_LENGTH_BYTES:end]), object_pairs_hook=_distinct)
        about = fields.pop("__metadata__", {})
        if about.get("format") != FORMAT:
            raise FormatError(f"it is not a {FORMAT} entry")
        if (version := str(about.get("version"))) != str(VERSION):
            raise FormatError(
                f"it has format version {version!r:.20}; this package reads {str(VERSION)!r}"
            )
        return _described(about, fields, end, size)
    except FormatError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"its header cannot be read: {error!r:.200}") from error


def metadata(kv: BlockKV, layout: Layout, checksums: Mapping[str, str]) -> dict[str, str]:
    texts = {name: getattr(kv, name) for name in _TEXTS}
    if (length := len(json.dumps(texts))) > _MOST_TEXT_BYTES:
        raise ValueError(
            f"fingerprint, digest, handle and namespace take {length} bytes together: expected at "
            f"most {_MOST_TEXT_BYTES}"
        )
    groups = {layer: n for n, (_, group) in enumerate(layout.groups) for layer in group}
    dtype = kv.keys[0].dtype if kv.scales is None else kv.scales.dtype
    about = {
        "format": FORMAT,
        "version": str(VERSION),
        **texts,
        "kv_dtype": "int8" if layout.quantized else "model",
        "dtype": checks.DTYPE_NAMES[dtype],
        "layers": ",".join(str(groups[layer]) for layer in range(len(layout.layers))),
        **checksums,
    }
    return {**about, _HEADER: _header_checksum(about, layout)}


def checksum(content: Buffer) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def _header_checksum(about: Mapping[str, str], layout: Layout) -> str:
    shapes = {name: [checks.DTYPE_NAMES[d], *shape] for name, (d, shape) in layout.tensors.items()}
    return checksum(json.dumps([about, shapes], sort_keys=True, separators=(",", ":")).encode())


def _described(about: dict[str, Any], fields: dict[str, Any], start: int, size: int) -> Header:
    about = {name: checks.check_text(value) for name, value in about.items()}
    expected = about.pop(_HEADER)
    places = {name: _place(field, start) for name, field in fields.items()}
    layout = _layout(about, places)
    if {name: (place.dtype, place.shape) for name, place in places.items()} != layout.tensors:
        raise ValueError("Unexpected tensors: expected the tensors of a block")
    end = start
    for place in sorted(places.values(), key=lambda place: place.start):
        if place.start != end or place.stop - end != place.nbytes:
            raise ValueError("The tensors overlap, leave gaps, or do not match their data's sizes")
        end = place.stop
    if end != size:
        raise FormatError(f"its header describes {end} bytes, found {size}")
    if _header_checksum(about, layout) != expected:
        raise FormatError("its header is damaged: its checksum does not match")
    dtype = checks.DTYPES[about["dtype"]]
    if not dtype.is_floating_point or not (layout.quantized or dtype == layout.layers[0].key_dtype):
        raise ValueError(f"Found dtype {dtype}, which does not match the keys")
    checksums = {name: about[name] for name in places}
    fingerprint, digest, handle, namespace = (about[name] for name in _TEXTS)
    return Header(fingerprint, digest, handle, namespace, dtype, layout, places, checksums)


def _layout(about: Mapping[str, str], places: Mapping[str, TensorSpec]) -> Layout:
    """Infer the layout. The caller must check that the tensors are exactly those of the layout."""
    quantized = {"model": False, "int8": True}[about["kv_dtype"]]
    (num_tokens,) = places[TOKEN_IDS].shape
    shapes, keys, values = list[LayerShape](), list[TensorSpec](), list[TensorSpec]()
    while tensor_name(0, "keys", number := len(shapes)) in places:
        heads = 1
        while tensor_name(heads, "keys", number) in places:
            heads += 1
        k, v = (places[tensor_name(0, kind, number)] for kind in ("keys", "values"))
        shapes.append(LayerShape(heads, k.shape[-1], v.shape[-1], k.dtype, v.dtype))
        keys.append(k._replace(shape=(heads, num_tokens, k.shape[-1])))
        values.append(v._replace(shape=(heads, num_tokens, v.shape[-1])))
    checks.check_states(places[TOKEN_IDS], keys, values, quantized=quantized)
    layers = about["layers"].split(",", checks.MOST_LAYERS)
    if len(layers) > checks.MOST_LAYERS:
        raise ValueError(f"Found more than {checks.MOST_LAYERS} layers")
    return Layout(num_tokens, tuple(shapes[_whole(int(group))] for group in layers), quantized)


def _place(field: Any, start: int) -> TensorSpec:
    if field.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"Found unexpected tensor fields {[*field]!r:.80}")
    first, last = map(_whole, field["data_offsets"])
    shape = tuple(map(_whole, field["shape"]))
    return TensorSpec(checks.DTYPES[field["dtype"]], shape, start + first, start + last)


def _whole(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"Found {number!r:.80}, expected a non-negative integer")
    return number


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("Found a duplicate name")
    return fields
