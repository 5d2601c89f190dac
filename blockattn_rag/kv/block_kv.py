"""BlockKV (the keys and values of a block), token digests and store keys."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockattn_rag.kv.quantization import KVScales, dequantize, quantize


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BlockKV:
    """Keys and values of one block, which do not depend on other blocks. Immutable.

    Args:
        keys: Keys of each layer that stores them, ``[num_kv_heads, num_tokens, head_dim]``, rotated
            to positions ``0..num_tokens-1``, in the model's dtype, or int8 if quantized.
        values: Values of the same layers. Their head size may differ from that of the keys.
        token_ids: Token ids ``[num_tokens]``, int64, on the CPU. Compared on every cache hit.
        fingerprint: Fingerprint of the model that the block was computed with.
        digest: ``token_digest`` of the block.
        handle: ``Block.handle`` of each text with these tokens, joined by ``joined_handles``.
            ``store gc`` uses it to find a passage's entries.
        scales: Quantization scales of the keys and values. None: the block is not quantized.
        namespace: Namespace of the tenant that stored the block; see ``store.namespaces``.
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
        """Keys and values of a layer in the model's dtype.

        Dequantizes a quantized block into new tensors. With ``exact_keys``, its keys are returned
        in float32, so that they can be rotated before they are rounded.
        """
        keys, values, *scales = self.tensors(layer)
        if self.scales is None:
            return keys, values
        dtype = self.scales.dtype
        keys = dequantize(keys, scales[0], torch.float32 if exact_keys else dtype)
        return keys, dequantize(values, scales[1], dtype)

    def tensors(self, layer: int) -> tuple[Tensor, ...]:
        """Keys and values of a layer as stored, then their scales if the block is quantized."""
        of_scales = self.scales and (self.scales.keys[layer], self.scales.values[layer])
        return self.keys[layer], self.values[layer], *(of_scales or ())

    def with_tensors(self, layers: Sequence[Sequence[Tensor]]) -> BlockKV:
        """Return a copy with other tensors, given per layer in the order of ``tensors``."""
        keys, values, *scales = zip(*layers, strict=True)
        return replace(
            self,
            keys=keys,
            values=values,
            scales=self.scales and replace(self.scales, keys=scales[0], values=scales[1]),
            token_ids=self.token_ids.clone(),
        )

    def quantized(self) -> BlockKV:
        """Return an int8 copy of this block, or the block itself if it is already quantized.

        Raises:
            ValueError: The keys and values do not all have the same floating-point dtype.
        """
        if self.scales is not None:
            return self
        keys, values, scales = quantize(self.keys, self.values)
        return replace(self, keys=keys, values=values, scales=scales)

    @property
    def key(self) -> str:
        """Store key of this block."""
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
        """Head count, head size and dtype of each layer's keys, then of each layer's values, as
        returned by ``states``."""
        dtype = None if self.scales is None else self.scales.dtype
        return outline((*self.keys, *self.values), dtype)

    @property
    def nbytes(self) -> int:
        """Size of keys, values and scales in bytes."""
        return sum(t.nbytes for layer in range(self.num_layers) for t in self.tensors(layer))

    def to(self, device: torch.device) -> BlockKV:
        """Return a copy of this block on ``device``, or the block itself if it is already there."""
        return self if self.device == device else self.copy_to(device)

    def copy_to(self, device: torch.device) -> BlockKV:
        """Return a copy on ``device`` that shares no memory. Token ids stay on the CPU."""
        layers = [self.tensors(layer) for layer in range(self.num_layers)]
        copies = iter(_copies([t for layer in layers for t in layer], device))
        return self.with_tensors([[next(copies) for _ in layer] for layer in layers])


def outline(
    states: Sequence[Tensor], dtype: torch.dtype | None = None
) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Head count, head size and dtype of keys or values ``[heads, tokens, head_dim]``, one per
    layer. ``dtype``: Dtype to return. Default: the dtype of the tensors."""
    return tuple((t.shape[0], t.shape[2], dtype or t.dtype) for t in states)


def token_digest(
    token_ids: Sequence[int], sink_ids: Sequence[int] = (), correction: str = ""
) -> str:
    """Digest of the tokens, sink and correction that a block is computed from, 64 hex digits.

    Without sink and correction, this is the SHA-256 of the token ids as 64-bit little-endian
    integers, so anyone with the tokenizer can compute it.

    Args:
        token_ids: Token ids of the block, including BOS if it has one.
        sink_ids: Token ids of the sink that the block is encoded with; see ``prompts.sinks``.
        correction: Digest of the correction that is applied to the block.
    """
    digest = _ids_digest(token_ids)
    if sink_ids:
        digest = _sha256(f"{digest} after {_ids_digest(sink_ids)}")
    return corrected_digest(digest, correction) if correction else digest


def corrected_digest(digest: str, correction: str) -> str:
    """``token_digest`` of a corrected block, given the digests of the block and the correction."""
    return _sha256(f"{digest} corrected by {correction}")


def store_key(fingerprint: str, digest: str, namespace: str = "") -> str:
    """Store key of a block: SHA-256 of namespace, fingerprint and digest, 64 hex digits."""
    return _sha256(f"{namespace}:{fingerprint}:{digest}")


MOST_HANDLES = 8
"""Maximum number of handles in a store entry, because the size of its header is limited."""


def joined_handles(handles: Iterable[str]) -> str:
    """Join the handles of texts with equal tokens, which share an entry, into a ``BlockKV.handle``.

    With more than ``MOST_HANDLES`` distinct handles, the result is empty. ``store gc`` then keeps
    the entry until it expires (``ttl_s``).
    """
    distinct = list(dict.fromkeys(handles))
    return ",".join(distinct) if len(distinct) <= MOST_HANDLES else ""


def split_handles(handle: str) -> tuple[str, ...]:
    """Split a ``BlockKV.handle`` into handles. Empty if the block's texts are unknown."""
    return tuple(handle.split(",")) if handle else ()


def _ids_digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}q", *token_ids)).hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _copies(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to ``device`` as one contiguous transfer per dtype."""
    parts = {}
    for dtype in {t.dtype for t in tensors}:
        same = [t.reshape(-1) for t in tensors if t.dtype == dtype]
        joined = torch.cat(same).to(device)
        parts[dtype] = iter(torch.split(joined, [len(t) for t in same]))
    return [next(parts[t.dtype]).view(t.shape) for t in tensors]
