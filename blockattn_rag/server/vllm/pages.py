"""One attention layer's pages: written by the layer itself, read where it was seen to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockattn_rag.errors import ServingError

_BASE = 128
"""Numbers below it are exact in every number type that a cache may have."""

Sizes = tuple[int, int, int]
"""Key-value heads, and the sizes of a head's keys and values."""


class LayerPages:
    """The pages of one layer of the engine.

    Backends lay keys and values out as their kernels like it. So they are written by the layer's
    own method. To read them, marked numbers are written once and looked for: where each of a
    page's elements went is the same for all pages.

    Args:
        layer: an ``Attention`` layer of vLLM, whose ``kv_cache`` is ``[pages, ...]``.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._places: Tensor | None = None

    @property
    def sizes(self) -> Sizes:
        layer = self._layer
        return layer.num_kv_heads, layer.head_size, getattr(layer, "head_size_v", layer.head_size)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._layer.kv_cache.device
        return device

    @property
    def tokens_per_page(self) -> int:
        """Tokens of a page as the layer's kernels count them: the scheduler's may hold several."""
        heads, key_size, value_size = self.sizes
        return int(self._layer.kv_cache[0].numel()) // (heads * (key_size + value_size))

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write states ``[kv_heads, tokens, head_size]``, of any float type, to slots
        ``[tokens]``."""
        layer = self._layer
        both = (states.transpose(0, 1).contiguous() for states in (keys, values))
        layer.impl.do_kv_cache_update(layer, *both, layer.kv_cache, slots)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[kv_heads, tokens, head_size]`` in slots ``[tokens]``, which start at
        the beginning of a page and go on to its end; copies in the cache's number type."""
        heads, key_size, value_size = self.sizes
        tokens = self.tokens_per_page
        pages = slots[::tokens] // tokens
        found = self._layer.kv_cache[pages].flatten(1)[:, self._measured()]
        keys, values = found.tensor_split([tokens * heads * key_size], dim=1)
        return (
            keys.reshape(-1, heads, key_size)[: len(slots)].transpose(0, 1).contiguous(),
            values.reshape(-1, heads, value_size)[: len(slots)].transpose(0, 1).contiguous(),
        )

    def _measured(self) -> Tensor:
        """For each element of a page, keys ``[tokens, heads, size]`` and then values, where it lies
        in the flat page."""
        if self._places is None:
            self._places = _measure(self)
        return self._places

    def share_layout(self, others: Sequence[LayerPages]) -> None:
        """Measure the layout, or take that of a layer which stores alike.

        Raises:
            ServingError: what is written is not to be found in the page as it was.
        """
        for other in others:
            if other._places is not None and self._stores_as(other):
                self._places = other._places
                return
        self._measured()

    def _stores_as(self, other: LayerPages) -> bool:
        mine, its = self._layer, other._layer
        return (
            self.sizes == other.sizes
            and type(mine.impl) is type(its.impl)
            and mine.kv_cache.shape == its.kv_cache.shape
            and mine.kv_cache.stride() == its.kv_cache.stride()
            and mine.kv_cache.dtype == its.kv_cache.dtype
        )


def _measure(pages: LayerPages) -> Tensor:
    """Write numbers that tell an element's place, digit by digit, to the first page; see where each
    came to lie. The page, which is nobody's (vLLM's null block), is left as it was."""
    cache: Tensor = pages._layer.kv_cache
    heads, key_size, value_size = pages.sizes
    tokens = pages.tokens_per_page
    count = tokens * heads * (key_size + value_size)
    page = cache[0]
    if not cache.dtype.is_floating_point or cache.dtype.itemsize < 2 or page.numel() != count:
        raise ServingError(
            f"found pages {tuple(cache.shape)} of {cache.dtype}, expected keys and values as the "
            "model computed them: blocks cannot be kept from this cache. Use --kv-cache-dtype "
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
            f"{type(pages._layer.impl).__name__} does not store keys and values as they are: "
            "blocks cannot be kept from its pages. Use another attention backend, or read_only and "
            "private_memory '0'"
        )
    return order
