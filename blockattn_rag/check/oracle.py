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


def block_mask(block_lengths: Sequence[int], window: int | None = None) -> Tensor:
    """Which token may see which: ``[n, n]`` bool, row sees column (Block-Attention, figure 1).

    Two context blocks of two tokens and a final block of two::

            a a b b F F
        a   1 . . . . .
        a   1 1 . . . .
        b   . . 1 . . .
        b   . . 1 1 . .
        F   1 1 1 1 1 .
        F   1 1 1 1 1 1

    Args:
        block_lengths: tokens of each block; the last block is the final one.
        window: sliding window: a token sees the last ``window`` tokens, itself included.
    """
    total = sum(block_lengths)
    mask = torch.zeros(total, total, dtype=torch.bool)
    reach = total if window is None else window
    start = 0
    for number, length in enumerate(block_lengths, start=1):
        first_seen = start if number < len(block_lengths) else 0
        for row in range(start, start + length):
            mask[row, max(first_seen, row - reach + 1) : row + 1] = True
        start += length
    return mask


def oracle_logits(hf_model: PreTrainedModel, block_ids: Sequence[Sequence[int]]) -> Tensor:
    """Logits ``[final tokens, vocab]`` of the final block (the last of ``block_ids``), float32."""
    ids = torch.tensor([[token for block in block_ids for token in block]], device=hf_model.device)
    lengths = [len(block) for block in block_ids]
    with torch.inference_mode():
        out = hf_model(input_ids=ids, attention_mask=_masks(hf_model, lengths), use_cache=False)
    return out.logits[0, -lengths[-1] :].float()


def oracle_generate(
    hf_model: PreTrainedModel,
    block_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
) -> list[int]:
    """Greedy tokens, one dense forward each; the new tokens belong to the final block."""
    blocks = [list(block) for block in block_ids]
    new: list[int] = []
    while len(new) < max_new_tokens and not (new and new[-1] in end_ids):
        token = int(oracle_logits(hf_model, blocks)[-1].argmax())
        new.append(token)
        blocks[-1].append(token)
    return new


def _masks(hf_model: PreTrainedModel, lengths: Sequence[int]) -> Any:
    """The mask as the model takes it: one for all layers, or one per kind of layer."""
    layers = DynamicCache(config=hf_model.config).layers
    windows = {getattr(layer, "sliding_window", None) for layer in layers}
    masks = {window: _additive(block_mask(lengths, window), hf_model) for window in windows}
    if len(windows) == 1:
        return masks.popitem()[1]
    (window,) = windows - {None}
    return {"full_attention": masks[None], "sliding_attention": masks[window]}


def _additive(mask: Tensor, hf_model: PreTrainedModel) -> Tensor:
    """0 where a token is seen and the dtype's minimum where not, ``[1, 1, n, n]``."""
    bias = torch.zeros(1, 1, *mask.shape, dtype=hf_model.dtype)
    return bias.masked_fill_(~mask, torch.finfo(hf_model.dtype).min).to(hf_model.device)
