"""Measure single kernels: key rotation, flash attention from several packages, and assembly.

* ``rotation``: rotating the keys of a layer, with a fused kernel and with PyTorch operations.
* ``flash``: causal attention of the last queries to all keys, with the heads of the 8B shape. Only
  exact kernels (``attention.flash``) are timed. ``SDPA`` is PyTorch's public function, which
  selects a kernel.
* ``assembly``: concatenating and rotating keys and values on the copy path.

Limits count the bytes of keys and values, read once and, if rotated, written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from first_token import BLOCK_TOKENS, LENGTHS, QUESTION_TOKENS, SHAPES, Prompt
from harness import Campaign, Case, Record, elapsed_s, median_s
from measuring import in_turns
from torch import Tensor

from blockattn_rag.attention.flash import exact_kernels
from blockattn_rag.kv.rope import RotaryLayout, rotate, rotate_into

HEADS, KV_HEADS, SIZE = 32, 8, 128
"""Numbers of heads, and head size, of the 8B shape."""


def cases(campaign: Campaign) -> Iterator[Case]:
    shapes, lengths = (("tiny",), (64,)) if campaign.dry else (SHAPES[:1], LENGTHS[:2])
    for length in lengths:
        yield Case(f"rotation/{length}", partial(rotation, campaign, length))
        for queries in (QUESTION_TOKENS, 1):
            yield Case(f"flash/{length}/{queries}", partial(flash, campaign, queries, length))
    for shape in shapes:
        for length in lengths:
            yield Case(f"{shape}/{length}/assembly", partial(assembly, campaign, shape, length))


def rotation(campaign: Campaign, length: int) -> Record:
    """Measure ``fused_s`` and ``separate_s`` of rotating the keys of a layer, and ``limit_s``."""
    dtype = torch.float32 if campaign.dry else torch.bfloat16
    keys = torch.randn(KV_HEADS, length, SIZE, device=campaign.device).to(dtype)
    layout, out = RotaryLayout(torch.ones(SIZE // 2), "half"), torch.empty_like(keys)
    cos, sin = layout.cos_sin(torch.arange(length), campaign.device)
    ways: dict[str, Callable[[], object]] = {
        "fused": partial(rotate_into, out, keys, cos, sin, layout),
        "separate": partial(rotate, keys, cos, sin, layout),
    }
    row = timed(campaign, ways)
    return row | {"limit_s": 2 * keys.nbytes / campaign.ceilings.bytes_per_s}


@torch.inference_mode()
def flash(campaign: Campaign, queries: int, length: int) -> Record:
    """Measure ``<kernel>_s`` of each exact kernel, and ``limit_s``."""
    device = campaign.device
    dtype = torch.float32 if campaign.dry else torch.bfloat16
    states = [
        torch.randn(1, heads, tokens, SIZE, device=device).to(dtype)
        for heads, tokens in ((HEADS, queries), (KV_HEADS, length), (KV_HEADS, length))
    ]
    seen = torch.ones(queries, length, dtype=torch.bool, device=device).tril(length - queries)
    ways: dict[str, Callable[[], object]] = {"SDPA": partial(sdpa, *states, seen)}
    if device.type == "cuda":
        for name, kernel in exact_kernels(device, dtype, SIZE).items():
            ways[name] = partial(kernel, *states, SIZE**-0.5, queries > 1)
    moved = sum(one.nbytes for one in states[1:])
    return timed(campaign, ways) | {"limit_s": moved / campaign.ceilings.bytes_per_s}


def sdpa(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(query, key, value, seen, enable_gqa=True)


def timed(campaign: Campaign, ways: dict[str, Callable[[], object]]) -> Record:
    runs = {name: partial(elapsed_s, way, campaign.device) for name, way in ways.items()}
    return in_turns(runs, 4 * campaign.repeats)


def assembly(campaign: Campaign, shape: str, length: int) -> Record:
    """Measure the case ``assembly``: ``assembly_s``, and a limit from the bytes of keys and
    values."""
    model, block = campaign.model(shape, max(LENGTHS) + 1024), min(BLOCK_TOKENS, length // 2)
    context = Prompt.drawn(model, length, block).context
    joined = partial(model.cache_for, context, assembly="copy")
    row = {"assembly_s": median_s(joined, model.device, campaign.repeats)}
    moved = 2 * length * model.bytes_per_token
    row["limit_s"] = moved / campaign.ceilings.bytes_per_s
    return row | {"length": length, "block_tokens": block}
