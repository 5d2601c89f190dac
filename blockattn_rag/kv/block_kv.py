"""BlockKV: the keys and values of one block, and the key under which they are stored."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockattn_rag.kv.quantization import KVScales, dequantise, quantise


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BlockKV:
    """Keys and values of one block, computed from the block's tokens alone. Never written to.

    Args:
        keys: per layer ``[num_kv_heads, num_tokens, head_dim]``, rotated for positions
            ``0..num_tokens-1``; model dtype, or int8 if quantised.
        values: per layer, same shape but for the head size.
        token_ids: ``[num_tokens]``, int64, on the CPU; compared on every hit.
        fingerprint: identity of the model, tokenizer and dtype that computed it.
        digest: ``token_digest`` of what was encoded.
        handle: ``Block.handle`` of each text that was encoded to these tokens, see
            ``joined_handles``; lets ``store gc`` find the entries of a passage.
        scales: of a quantised block's keys and values; None: they are as the model computed them.
        namespace: for whom it is stored; see ``store.namespaces``.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    token_ids: Tensor
    fingerprint: str
    digest: str
    handle: str
    scales: KVScales | None = None
    namespace: str = ""

    def states(self, layer: int, *, exact_keys: bool = False) -> tuple[Tensor, Tensor]:
        """A layer's keys and values in the model's dtype.

        Those of a quantised block are new tensors, dequantised and rounded once. With
        ``exact_keys`` its keys come in float32, for a caller who rotates them and rounds then.
        """
        keys, values = self.stored(layer)
        scales = self.scales
        if scales is None:
            return keys, values
        keys_dtype = torch.float32 if exact_keys else scales.dtype
        return (
            dequantise(keys, scales.keys[layer], keys_dtype),
            dequantise(values, scales.values[layer], scales.dtype),
        )

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values as they lie in memory: int8 in a quantised block."""
        return self.keys[layer], self.values[layer]

    def tensors(self, layer: int) -> tuple[Tensor, ...]:
        """A layer's keys and values, and the scales of both in a quantised block, as they lie in
        memory."""
        of_scales = self.scales and (self.scales.keys[layer], self.scales.values[layer])
        return self.keys[layer], self.values[layer], *(of_scales or ())

    def with_tensors(self, layers: Sequence[Sequence[Tensor]]) -> BlockKV:
        """This block in other memory: ``layers`` are as from ``tensors``, its token ids a copy."""
        keys, values, *scales = zip(*layers, strict=True)
        return replace(
            self,
            keys=keys,
            values=values,
            scales=self.scales and replace(self.scales, keys=scales[0], values=scales[1]),
            token_ids=self.token_ids.clone(),
        )

    def quantised(self) -> BlockKV:
        """This block in int8 (``kv.quantization``); itself if it is quantised.

        Raises:
            ValueError: its keys and values are of several number types.
        """
        if self.scales is not None:
            return self
        states = [self.states(layer) for layer in range(self.num_layers)]
        keys, values, scales = quantise(*zip(*states, strict=True))
        return replace(self, keys=keys, values=values, scales=scales)

    @property
    def key(self) -> str:
        """Where a store holds this block."""
        return store_key(self.fingerprint, self.digest, self.namespace)

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def token_outline(self) -> tuple[tuple[int, int, torch.dtype], ...]:
        """Heads, head size and number type of each layer's keys, and then values, as ``states``
        gives them."""
        found = outline((*self.keys, *self.values))
        if self.scales is None:
            return found
        return tuple((heads, size, self.scales.dtype) for heads, size, _ in found)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return sum(t.nbytes for layer in range(self.num_layers) for t in self.tensors(layer))

    def to(self, device: torch.device) -> BlockKV:
        """This block on ``device``; itself if it is there."""
        return self if self.device == device else self.copy_to(device)

    def copy_to(self, device: torch.device) -> BlockKV:
        """A copy on ``device`` that shares no memory with this one, not even its token ids."""
        layers = [self.tensors(layer) for layer in range(self.num_layers)]
        copies = iter(_copies([t for layer in layers for t in layer], device))
        return self.with_tensors([[next(copies) for _ in layer] for layer in layers])


def outline(states: Sequence[Tensor]) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Heads, head size and number type of states ``[heads, tokens, head_dim]``."""
    return tuple((t.shape[0], t.shape[2], t.dtype) for t in states)


def token_digest(
    token_ids: Sequence[int], sink_ids: Sequence[int] = (), correction: str = ""
) -> str:
    """What a block was computed from, 64 hex digits.

    Of a block that was encoded alone it is the sha256 of its token ids as 64-bit little-endian
    integers, which whoever has a tokenizer can compute.

    Args:
        token_ids: the block's, BOS included where it has one.
        sink_ids: of the tokens that it was encoded after; see ``prompts.sinks``.
        correction: digest of the correction that changed it.
    """
    digest = _ids_digest(token_ids)
    if sink_ids:
        digest = _sha256(f"{digest} after {_ids_digest(sink_ids)}")
    return corrected_digest(digest, correction) if correction else digest


def corrected_digest(digest: str, correction: str) -> str:
    """``token_digest`` of a corrected block, from that of the block and that of the correction."""
    return _sha256(f"{digest} corrected by {correction}")


def store_key(fingerprint: str, digest: str, namespace: str = "") -> str:
    """Where a block's KV is stored: 64 hex digits of sha256(namespace, fingerprint, digest)."""
    return _sha256(f"{namespace}:{fingerprint}:{digest}")


MOST_HANDLES = 8
"""Texts that an entry names, at most: a header has room for that many handles."""


def joined_handles(handles: Iterable[str]) -> str:
    """``BlockKV.handle`` of texts that share one entry because their tokens are equal.

    The handles are separated by commas, each once. Empty if there are more than ``MOST_HANDLES``:
    ``store gc`` then cannot find out who uses the entry, and leaves it to its time to live.
    """
    distinct = list(dict.fromkeys(handles))
    return ",".join(distinct) if len(distinct) <= MOST_HANDLES else ""


def split_handles(handle: str) -> tuple[str, ...]:
    """The handles in ``BlockKV.handle``; none if its texts are unknown."""
    return tuple(handle.split(",")) if handle else ()


def _ids_digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}q", *token_ids)).hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _copies(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on ``device``: for each number type one piece of memory, made by one transfer."""
    copies = list(tensors)
    for dtype in {t.dtype for t in tensors}:
        places = [place for place, t in enumerate(tensors) if t.dtype == dtype]
        joined = torch.cat([tensors[place].reshape(-1) for place in places]).to(device)
        parts = torch.split(joined, [tensors[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            copies[place] = part.view(tensors[place].shape)
    return copies
