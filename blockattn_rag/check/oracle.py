"""The oracle: what block mode means, computed the slow and obvious way.

One dense forward over all tokens of the prompt with the block mask written out in full. Nothing is
stored, moved or merged. Only tests and ``check`` import this module; fast code never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from blockattn_rag.attention.context_merge import ContextMerge
from blockattn_rag.check.layout import layout_of
from blockattn_rag.check.weighing import weighing
from blockattn_rag.kv.context import Positions


def block_mask(
    block_lengths: Sequence[int], window: int | None = None, sink_length: int = 0
) -> Tensor:
    """Which token may see which: ``[n, n]`` bool, row sees column (Block-Attention, figure 1).

    Two context blocks of two tokens and a final block of two; and the same with a sink ``s``::

            a a b b F F             a a s b b F F
        a   1 . . . . .         a   1 . . . . . .
        a   1 1 . . . .         a   1 1 . . . . .
        b   . . 1 . . .         s   . . 1 . . . .
        b   . . 1 1 . .         b   . . 1 1 . . .
        F   1 1 1 1 1 .         b   . . 1 1 1 . .
        F   1 1 1 1 1 1         F   1 1 . 1 1 1 .
                                F   1 1 . 1 1 1 1

    Args:
        block_lengths: tokens of each block; the last block is the final one.
        window: sliding window: a token sees the last ``window`` tokens, itself included.
        sink_length: tokens of the sink before each block but the first and the final one.
    """
    block, position, is_sink = layout_of(block_lengths, sink_length)
    seen = (block[:, None] == block) | ((block == len(block_lengths) - 1)[:, None] & ~is_sink)
    seen = seen.tril()
    return seen if window is None else seen & (position[:, None] - position < window)


def oracle_logits(
    hf_model: PreTrainedModel,
    block_ids: Sequence[Sequence[int]],
    sink_ids: Sequence[int] = (),
    *,
    merge: ContextMerge | None = None,
    positions: Positions = "reordered",
) -> Tensor:
    """Logits ``[final tokens, vocab]`` of the final block (the last of ``block_ids``), float32.

    Args:
        sink_ids: tokens that each block but the first and the final one sees right before itself,
            and nothing else sees.
        merge: how the final block weighs the blocks between the first and itself.
        positions: where keys of context blocks stand.
    """
    lengths = [len(block) for block in block_ids]
    layout = layout_of(lengths, len(sink_ids))
    first, *middle, final = block_ids if len(block_ids) > 1 else ((), *block_ids)
    ids = [*first, *(token for block in middle for token in (*sink_ids, *block)), *final]
    position = layout.position
    if positions == "composite":
        starts = torch.tensor([sum(lengths[:number]) for number in range(len(lengths))])
        is_final = layout.block == len(lengths) - 1
        position = torch.where(is_final, position, position - starts[layout.block])
    is_plain = positions == "reordered" and not layout.is_sink.any()
    with torch.inference_mode(), weighing(hf_model, merge, layout):
        out = hf_model(
            input_ids=torch.tensor([ids], device=hf_model.device),
            attention_mask=_masks(hf_model, lengths, len(sink_ids)),
            use_cache=False,
            **({} if is_plain else {"position_ids": position[None].to(hf_model.device)}),
        )
    return out.logits[0, -lengths[-1] :].float()


def oracle_generate(
    hf_model: PreTrainedModel,
    block_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    sink_ids: Sequence[int] = (),
    *,
    merge: ContextMerge | None = None,
) -> list[int]:
    """Greedy tokens, one dense forward each; the new tokens belong to the final block."""
    blocks = [list(block) for block in block_ids]
    new: list[int] = []
    while len(new) < max_new_tokens and not (new and new[-1] in end_ids):
        token = int(oracle_logits(hf_model, blocks, sink_ids, merge=merge)[-1].argmax())
        new.append(token)
        blocks[-1].append(token)
    return new


def _masks(hf_model: PreTrainedModel, lengths: Sequence[int], sink_length: int) -> Any:
    """The mask as the model takes it: one for all layers, or one per kind of layer."""
    layers = DynamicCache(config=hf_model.config).layers
    windows = {getattr(layer, "sliding_window", None) for layer in layers}
    masks = {w: _additive(block_mask(lengths, w, sink_length), hf_model) for w in windows}
    if len(windows) == 1:
        return masks.popitem()[1]
    (window,) = windows - {None}
    return {"full_attention": masks[None], "sliding_attention": masks[window]}


def _additive(mask: Tensor, hf_model: PreTrainedModel) -> Tensor:
    """0 where a token is seen and the dtype's minimum where not, ``[1, 1, n, n]``."""
    bias = torch.zeros(1, 1, *mask.shape, dtype=hf_model.dtype)
    return bias.masked_fill_(~mask, torch.finfo(hf_model.dtype).min).to(hf_model.device)
