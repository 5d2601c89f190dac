"""Reference for recomputed tokens: dense forward passes with the model's own attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from blockattn_rag.check.oracle import block_mask
from blockattn_rag.model import BlockModel
from blockattn_rag.model.recompute import measured_layers
from blockattn_rag.model.relay_attention import layer_windows


def measured(model: BlockModel) -> list[int]:
    """Return the layers whose attention determines which tokens are recomputed."""
    return measured_layers(layer_windows(model.profile.kinds))


def masks(hf_model: Any, seen: Tensor, positions: Tensor) -> Any:
    """Return the additive mask of a forward pass, or one mask per type of layer."""
    found = {}
    for layer in DynamicCache(config=hf_model.config).layers:
        window = getattr(layer, "sliding_window", None)
        near = positions[:, None] - positions < (window or len(positions) ** 2)
        name = "full_attention" if window is None else "sliding_attention"
        bias = torch.zeros(1, 1, *seen.shape)
        found[name] = bias.masked_fill(~(seen & near), torch.finfo(torch.float32).min)
    return found if len(found) > 1 else found.popitem()[1]


def dense_attention(model: BlockModel, blocks: Sequence[list[int]]) -> Tensor:
    """Attention of the last block to each earlier token in the measured layers, computed by a dense
    forward pass with the block mask."""
    hf_model: Any = model.hf_model
    hf_model.set_attn_implementation("eager")
    seen, num = block_mask([*map(len, blocks)]), sum(map(len, blocks[:-1]))
    ids = torch.tensor([[token for block in blocks for token in block]])
    mask = masks(hf_model, seen, torch.arange(len(seen)))
    with torch.no_grad():
        out = hf_model(input_ids=ids, attention_mask=mask, output_attentions=True, use_cache=False)
    found = [out.attentions[layer][0, :, num:, :num] for layer in measured(model)]
    return torch.stack([one.mean(dim=(0, 1)) for one in found]).sum(0)


def dense_logits(model: BlockModel, blocks: Sequence[list[int]], chosen: list[int]) -> Tensor:
    """Logits after the last block from one dense forward pass over the context in block mode, the
    chosen tokens again with full attention, and the last block, which attends to the latter."""
    *context, final = blocks
    tokens = [token for block in context for token in block]
    num = len(tokens)
    positions = torch.tensor([*range(num), *chosen, *range(num, num + len(final))])
    ids = torch.tensor([[*tokens, *(tokens[one] for one in chosen), *final]])
    is_replaced = torch.zeros(len(positions), dtype=torch.bool)
    is_replaced[chosen] = True
    seen = (positions[:, None] >= positions) & ~is_replaced
    seen[:num] = False
    seen[:num, :num] = block_mask([*map(len, context), 1])[:num, :num]
    seen[num:, num:] &= positions[num:, None] >= positions[num:]
    with torch.no_grad():
        out = model.hf_model(
            input_ids=ids,
            attention_mask=masks(model.hf_model, seen, positions),
            position_ids=positions[None],
            use_cache=False,
        )
    logits: Tensor = out.logits[0, -1]
    return logits
