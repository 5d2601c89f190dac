"""Reads and writes the pages of an attention layer, independently of their layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockattn_rag.errors import ServingError

_BASE = 128  # Smaller integers are exact in every cache dtype.
_NULL = 0  # Id of vLLM's null page, which stands for pages outside a sliding window.

Sizes = tuple[int, int, int]
"""Number of key-value heads, and the sizes of a head's keys and values."""

States = tuple[Tensor, Tensor]
"""Keys and values ``[kv_heads, tokens, head_size]``."""

PageTables = Sequence[Sequence[int]]
"""Page ids of a request's tokens, in order, per KV cache group."""


class KVGroup(NamedTuple):
    """KV cache group of an engine: layers that share a page table.

    Args:
        table: Index of the group's page table among a request's page tables.
        page_tokens: Number of tokens per scheduler page.
    """

    table: int
    page_tokens: int

    def first_token(self, tables: PageTables) -> int:
        """Return the index of the first token with a page. Earlier ones are outside the window."""
        table = tables[self.table]
        null = next((place for place, page in enumerate(table) if page != _NULL), len(table))
        return null * self.page_tokens

    def slots(self, tables: PageTables, tokens: range, device: torch.device) -> Tensor:
        """Return the slots of consecutive tokens in the cache, int64 ``[tokens]``."""
        size = self.page_tokens
        table = tables[self.table][tokens.start // size : -(-tokens.stop // size)]
        starts = torch.tensor(table, dtype=torch.int64, device=device) * size
        slots = (starts[:, None] + torch.arange(size, device=device)).flatten()
        return slots[tokens.start % size :][: len(tokens)]


def joined(parts: Iterable[States]) -> States:
    """Concatenate the keys and values of consecutive tokens."""
    keys, values = (torch.cat(states, dim=1) for states in zip(*parts, strict=True))
    return keys, values


def sizes_of(layer: Any) -> Sizes:
    if (latent := getattr(layer, "kv_lora_rank", None)) is not None:
        return 1, layer.head_size - latent, latent
    return layer.num_kv_heads, layer.head_size, getattr(layer, "head_size_v", layer.head_size)


class LayerPages:
    """Pages of one layer in the engine.

    Layouts differ between backends, so pages are written by the backend itself. For reading, the
    layout is measured, by writing numbered elements to a page and locating them.

    Args:
        layer: vLLM's attention layer. Keys and values of a latent layer are its rotary key and its
            latent.
        interleaves_keys: Whether the engine stores the two dimensions of each rotary pair next to
            each other. Blocks store them in the first and second half of a key.
    """

    def __init__(self, layer: Any, group: KVGroup, *, interleaves_keys: bool = False) -> None:
        self.layer = layer
        self.group = group
        self.sizes = sizes_of(layer)
        self._interleaves_keys = interleaves_keys
        self._places: Tensor
        """Index into the flattened page for each element of keys ``[tokens, heads, size]``, then of
        values, with the dimensions of keys in the order of ``write``. Set by ``measure``."""

    @property
    def device(self) -> torch.device:
        device: torch.device = self.layer.kv_cache.device
        return device

    @property
    def tokens_per_page(self) -> int:
        """Tokens per kernel page. A scheduler page may consist of several kernel pages."""
        heads, key_size, value_size = self.sizes
        return int(self.layer.kv_cache[0].numel()) // (heads * (key_size + value_size))

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write keys and values ``[kv_heads, tokens, head_size]`` of any float dtype to slots."""
        layer = self.layer
        if self._interleaves_keys:
            keys = keys.reshape(*keys.shape[:-1], 2, -1).mT.flatten(-2)
        key, value = (states.transpose(0, 1).contiguous() for states in (keys, values))
        if hasattr(layer, "kv_lora_rank"):
            scaling = layer.kv_cache_dtype, layer._k_scale
            layer.impl.do_kv_cache_update(value[:, 0], key, layer.kv_cache, slots, *scaling)
        else:
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)

    def read(self, slots: Tensor) -> States:
        """Copy keys and values ``[kv_heads, tokens, head_size]`` from slots ``[tokens]``. The slots
        must be those of consecutive tokens, and the first must be at the start of a page."""
        heads, key_size, value_size = self.sizes
        tokens = self.tokens_per_page
        pages = slots[::tokens] // tokens
        found = self.layer.kv_cache[pages].flatten(1)[:, self._places]
        keys, values = found.tensor_split([tokens * heads * key_size], dim=1)
        return (
            keys.reshape(-1, heads, key_size)[: len(slots)].transpose(0, 1).contiguous(),
            values.reshape(-1, heads, value_size)[: len(slots)].transpose(0, 1).contiguous(),
        )

    def measure(self, known: dict[tuple[Any, ...], Tensor]) -> None:
        """Measure the layout for ``read``, unless a layer with the same layout is in ``known``."""
        cache = self.layer.kv_cache
        kind = (
            *(cache.shape, cache.stride(), cache.dtype),
            *(type(self.layer.impl), self.sizes, self._interleaves_keys),
        )
        if kind not in known:
            known[kind] = _measure(self)
        self._places = known[kind]


def _measure(pages: LayerPages) -> Tensor:
    """Measure a layout: write the index of each element to vLLM's null page, digit by digit, and
    locate it. The page, which no request reads, is restored afterwards."""
    cache: Tensor = pages.layer.kv_cache
    heads, key_size, value_size = pages.sizes
    tokens = pages.tokens_per_page
    count = tokens * heads * (key_size + value_size)
    page = cache[0]
    if not cache.dtype.is_floating_point or cache.dtype.itemsize < 2 or page.numel() != count:
        raise ServingError(
            f"Blocks cannot be saved from this cache: found pages {tuple(cache.shape)} of "
            f"{cache.dtype}, expected keys and values in the model's dtype. Use --kv-cache-dtype "
            "auto, or read_only and private_memory '0'"
        )
    before = page.clone()
    slots = torch.arange(tokens, device=cache.device)
    numbers = torch.arange(count, device=cache.device)
    found = torch.zeros(count, dtype=torch.int64, device=cache.device)
    power = 1
    while power < count:
        digits = (numbers // power % _BASE).to(cache.dtype)
        keys, values = digits.tensor_split([tokens * heads * key_size])
        pages.write(
            keys.view(tokens, heads, key_size).transpose(0, 1),
            values.view(tokens, heads, value_size).transpose(0, 1),
            slots,
        )
        found += page.flatten().to(torch.int64) * power
        power *= _BASE
    page.copy_(before)
    order = found.argsort()
    if not torch.equal(found[order], numbers):
        raise ServingError(
            f"Blocks cannot be saved from pages of {type(pages.layer.impl).__name__}, because it "
            "changes the keys and values that it stores. Use another attention backend, or "
            "read_only and private_memory '0'"
        )
    return order
