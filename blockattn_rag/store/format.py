"""Encoding of entries as safetensors files, with checksums for each tensor and the header.

``docs/format.md`` is the specification. Stores use ``encoded`` and ``decoded``, which also check
keys and name the entry's location in errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from safetensors.torch import save
from torch import Tensor

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.quantization import KVScales
from blockattn_rag.store import checks
from blockattn_rag.store.header import (
    TOKEN_IDS,
    FormatError,
    Header,
    Layout,
    checksum,
    header_end,
    metadata,
    parse_header,
    tensor_name,
)

HeadsByLayer = Mapping[int, range]
"""Part of an entry: the heads to read, by layer. Layers of a group must have the same heads."""


def encode(kv: BlockKV) -> bytes:
    kv = kv.to(torch.device("cpu"))
    layout = Layout.of(kv)
    states = {"keys": kv.keys, "values": kv.values}
    if kv.scales is not None:
        states["key_scales"] = tuple(scale.squeeze(1) for scale in kv.scales.keys)
        states["value_scales"] = tuple(scale.squeeze(2) for scale in kv.scales.values)
    tensors = {TOKEN_IDS: kv.token_ids.contiguous()}
    for number, (shape, layers) in enumerate(layout.groups):
        for head, kind in itertools.product(range(shape.heads), layout.kinds):
            parts = [states[kind][layer][head].detach() for layer in layers]
            tensors[tensor_name(head, kind, number)] = torch.stack(parts)
    flat = {name: tensor.flatten().view(torch.uint8) for name, tensor in tensors.items()}
    checksums = {name: checksum(part.numpy().data) for name, part in flat.items()}
    return save(tensors, metadata(kv, layout, checksums))


def decode(raw: Tensor) -> BlockKV:
    """Decode an entry, uint8 ``[size]``. Keys and values may be views of ``raw``.

    Each layer is ``[heads, tokens, dim]``, with contiguous heads. Contents are validated even if
    all checksums match, because an attacker can compute valid checksums.
    """
    view = raw.numpy().data
    header = parse_header(view, len(view))
    layers = {n: range(layer.heads) for n, layer in enumerate(header.layout.layers)}
    return decode_part(header, layers, raw[header_end(view) :])


def ranges(header: Header, part: HeadsByLayer) -> list[tuple[int, int]]:
    """Return the byte ranges (start, stop) of the token ids and of a part, sorted and merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in (header.places[name][2:] for name in _names(header, part)):
        if merged and merged[-1][1] == start:
            start, _ = merged.pop()
        merged.append((start, stop))
    return merged


def decode_part(header: Header, part: HeadsByLayer, data: Tensor) -> BlockKV:
    """Decode part of an entry as a block with the entry's key. ``data``: Concatenated bytes of
    ``ranges(header, part)``, uint8. Keys and values may be views of it."""
    layout, tensors, at = header.layout, dict[str, Tensor](), 0
    for name in _names(header, part):
        stop = at + header.places[name].nbytes
        tensors[name] = _verified(header, name, data[at:stop])
        at = stop
    # Copy the token ids: a view would keep all keys and values in host memory after they have been
    # moved to a device.
    token_ids = tensors[TOKEN_IDS].clone()
    if token_ids.min() < 0:
        raise FormatError(f"found token id {int(token_ids.min())}, expected 0 or more")
    states: dict[str, dict[int, Tensor]] = {kind: {} for kind in layout.kinds}
    for number, (_, members) in enumerate(layout.groups):
        own = [layer for layer in members if layer in part]
        for kind in layout.kinds if own else ():
            joined = _stacked([tensors[tensor_name(h, kind, number)] for h in part[own[0]]])
            for layer in own:
                state = joined[:, members.index(layer)]
                # Copy the layers: a view would keep the other layers in memory.
                states[kind][layer] = state if len(own) == len(members) else state.clone()
    by_layer = {kind: [part[layer] for layer in sorted(part)] for kind, part in states.items()}
    scales = None
    if layout.quantized:
        key_scales = tuple(scale.unsqueeze(1) for scale in by_layer["key_scales"])
        value_scales = tuple(scale.unsqueeze(2) for scale in by_layer["value_scales"])
        scales = KVScales(key_scales, value_scales, header.dtype)
    kv = BlockKV(
        keys=tuple(by_layer["keys"]),
        values=tuple(by_layer["values"]),
        token_ids=token_ids,
        fingerprint=header.fingerprint,
        digest=header.digest,
        handle=header.handle,
        scales=scales,
        namespace=header.namespace,
    )
    if layout.quantized and not checks.is_finite(kv):
        raise FormatError(f"its scales are too large for {header.dtype}")
    return kv


def check_entry_key(key: str, entry: BlockKV | Header, place: object) -> None:
    if entry.key != key:
        raise FingerprintMismatchError(
            f"{place} contains the entry of another text, model or tenant, whose key is "
            f"{entry.key} (fingerprint {entry.fingerprint!r}); delete it, or put the block again"
        )


def encoded(key: str, kv: BlockKV, place: object) -> bytes:
    checks.check_entry(key, kv)
    checks.check_finite(kv, place)
    return encode(kv)


def decoded(key: str, raw: Tensor, place: object) -> BlockKV:
    with damage_reported(place):
        kv = decode(raw)
    check_entry_key(key, kv, place)
    return kv


@contextmanager
def damage_reported(place: object) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        raise CorruptEntryError(
            f"{place} is damaged: {error}; delete it, or put the block again"
        ) from error


def _names(header: Header, part: HeadsByLayer) -> list[str]:
    layout, names = header.layout, [TOKEN_IDS]
    for number, (_, members) in enumerate(layout.groups):
        heads = next((part[layer] for layer in members if layer in part), range(0))
        names += [tensor_name(head, kind, number) for head in heads for kind in layout.kinds]
    return sorted(names, key=lambda name: header.places[name].start)


def _verified(header: Header, name: str, raw: Tensor) -> Tensor:
    """Verify a tensor's bytes. Returns a view of them, or a copy if they are not aligned."""
    if checksum(raw.numpy().data) != header.checksums[name]:
        raise FormatError(f"its {name} is damaged: the checksum does not match")
    dtype, shape = header.places[name][:2]
    is_aligned = raw.storage_offset() % dtype.itemsize == 0
    tensor = (raw if is_aligned else raw.clone()).view(dtype).view(shape)
    if dtype.is_floating_point and not checks.all_finite(tensor):
        raise FormatError(f"its {name} contains NaN or infinity")
    return tensor


def _stacked(heads: Sequence[Tensor]) -> Tensor:
    """Stack tensors of equal shape into ``[tensors, …]``, as a view if they are evenly spaced."""
    first, offsets = heads[0], [head.storage_offset() for head in heads]
    step = offsets[1] - offsets[0] if len(heads) > 1 else first.numel()
    is_even = step > 0 and offsets == [offsets[0] + n * step for n in range(len(heads))]
    if not is_even or len({head.untyped_storage().data_ptr() for head in heads}) > 1:
        return torch.stack([*heads])
    return first.as_strided((len(heads), *first.shape), (step, *first.stride()), offsets[0])
