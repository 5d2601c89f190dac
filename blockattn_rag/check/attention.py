"""The oracle's attention: positions of tokens, and attention with an adapter.

The final block attends to each passage's keys and values as changed by the adapter. All other rows
attend to the unchanged keys and values. The formula of ``model.correction`` is written out here
block by block, in float64, with explicit attention weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.rope import RotaryLayout, rotate
from blockattn_rag.model.correction import PLACES, Correction

_NAME = "blockattn_oracle"


class Layout(NamedTuple):
    """Blocks and positions of a prompt's tokens, with one entry per token.

    ``block``: Index of the token's block. A sink belongs to the block that follows it.
    ``position``: Position in the prompt. A sink occupies the positions right before its block
    without moving the block. ``is_sink``: Whether the token belongs to a sink.
    """

    block: Tensor
    position: Tensor
    is_sink: Tensor


def layout_of(block_lengths: Sequence[int], sink_length: int = 0) -> Layout:
    """Layout of a prompt with a sink before each block except the first and the final one."""
    block: list[int] = []
    position: list[int] = []
    is_sink: list[bool] = []
    start, final = 0, len(block_lengths) - 1
    for number, length in enumerate(block_lengths):
        sink = sink_length if 0 < number < final else 0
        block += [number] * (sink + length)
        position += range(start - sink, start + length)
        is_sink += [True] * sink + [False] * length
        start += length
    return Layout(torch.tensor(block), torch.tensor(position), torch.tensor(is_sink))


@contextmanager
def adapting(
    hf_model: PreTrainedModel,
    layout: Layout,
    adapter: Correction | None,
    layouts: Sequence[RotaryLayout],
    masses: list[Tensor] | None = None,
) -> Iterator[None]:
    """Replace the model's attention within the ``with`` block.

    Args:
        layout: Blocks of the prompt's tokens, and positions of their keys.
        adapter: Adapter for the passages' keys and values. None: they stay unchanged.
        masses: List to which each layer appends the final block's attention weights,
            ``[heads, final tokens, tokens]``.

    Raises:
        UnsupportedModelError: the model's attention cannot be replaced.
    """
    if adapter is None and masses is None:
        yield
        return
    final = int(layout.block[-1])
    rows = layout.block == final
    before = hf_model.config._attn_implementation

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        groups, layer = query.shape[1] // key.shape[1], module.layer_idx
        scale = kwargs.get("scaling") or 1 / math.sqrt(query.shape[-1])

        def attend(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = (s.repeat_interleave(groups, dim=1).double() for s in (key, value))
            scores = query.double() @ keys.mT * scale
            if (cap := kwargs.get("softcap")) is not None:
                scores = cap * (scores / cap).tanh()
            scores = scores + mask
            if (sinks := kwargs.get("s_aux")) is not None:  # attention sinks, one score per head
                own = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
                weights = torch.cat([scores, own], dim=-1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            return weights, weights @ values

        weights, outputs = attend(key, value)
        if adapter is not None:
            key, value = _adapted(adapter, layer, key, value, layout, layouts[layer])
            weights, seen = attend(key, value)
            outputs[:, :, rows] = seen[:, :, rows]
        if masses is not None:
            masses.append(weights[0, :, rows])
        return outputs.to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, attention)
    hf_model.set_attn_implementation(_NAME)
    if hf_model.config._attn_implementation != _NAME:
        raise UnsupportedModelError(
            f"{type(hf_model).__name__} does not use transformers' attention interface, so the "
            "oracle cannot compute adapters and promotion for it. Check the model without a recipe."
        )
    try:
        yield
    finally:
        hf_model.set_attn_implementation(before)


def _adapted(
    adapter: Correction,
    layer: int,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    rotary: RotaryLayout,
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[1, K, n, D]`` with the adapter applied to the passages."""
    key, value = key.double(), value.double()
    weight, bias = (tensor.to(key.device, key.dtype) for tensor in adapter.layers[layer])
    for block in range(1, int(layout.block[-1])):
        at = (layout.block == block) & ~layout.is_sink
        offsets = layout.position[at]
        bare = _turned(key[0][:, at], -offsets, rotary)
        states = torch.cat([bare, value[0][:, at]], dim=-1)
        place = [sum(index >= end for end in PLACES) for index in range(states.shape[1])]
        changed = states + states @ weight + bias[:, place]
        new_key, new_value = changed.split([key.shape[-1], value.shape[-1]], dim=-1)
        key[0][:, at], value[0][:, at] = _turned(new_key, offsets, rotary), new_value
    return key, value


def _turned(keys: Tensor, positions: Tensor, rotary: RotaryLayout) -> Tensor:
    if not rotary.rotates:
        return keys
    cos, sin = (table.double() for table in rotary.cos_sin(positions, keys.device))
    return rotate(keys, cos, sin, rotary)
