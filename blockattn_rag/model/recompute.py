"""Recomputation: a share of the passages' tokens, chosen by the question, with full attention.

Block mode computes each passage alone. Here, the tokens that the question attends to most are
computed again and attend to everything before them; the others keep their keys and values. This
costs two more forward passes: one of the question, for its attention, and one of the chosen tokens.
CacheBlend (arXiv 2405.16444) recomputes tokens; ProphetKV and QCFuse choose them by the question.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import fold_heads
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, PlacedBlock
from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.caches import ContextCache, copied_cache
from blockattn_rag.model.relay_attention import enable_relay, last_logits


class ContextAttention:
    """Attention over a copied context that adds up how much each of its tokens receives, in
    ``total``; see ``attention_to_context``."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.total = torch.zeros(tokens, device=device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        tail_key: Tensor,
        tail_value: Tensor,
        scale: float,
        tail_mask: Tensor | None,
    ) -> Tensor:
        """See ``RelayPlan.attend``. The tail begins with the context."""
        batch, heads, tokens, _ = query.shape
        folded, mask = fold_heads(query, tail_mask, tail_key.shape[1])
        scores = folded.float() @ tail_key.float().mT * scale
        if mask is not None:
            scores = scores.masked_fill_(~mask, -math.inf)
        weights = scores.softmax(-1)
        self.total += weights[..., : len(self.total)].mean(dim=(0, 1, 2))
        return (weights.to(tail_value.dtype) @ tail_value).reshape(batch, heads, tokens, -1)


def recompute(
    model: BlockModel,
    context: Context,
    is_passage: Sequence[bool],
    final_ids: Sequence[int],
    share: float,
) -> tuple[Context, int]:
    """Recompute tokens of a context for one question.

    Args:
        model: The model. The caller must hold its lock.
        context: The context, with reordered positions.
        is_passage: Whether tokens of each block may be chosen. A system block never needs it: as
            the first block, it already attends to everything before it.
        final_ids: Token ids of the final block.
        share: Share of the passages' tokens.

    Returns:
        The context as one block of its own, and the number of recomputed tokens. The given context
        and 0 if the share is less than half a token.

    Raises:
        UnsupportedModelError: the model has sliding windows, soft caps or attention sinks.
    """
    if not model.supports_relay:
        raise UnsupportedModelError(
            f"{model.name} cannot recompute tokens: it has sliding windows, soft caps, attention "
            "sinks or its own attention interface; use a recipe with recompute=0"
        )
    device = model.device
    allowed = torch.cat(
        [
            torch.full((b.kv.num_tokens,), one)
            for b, one in zip(context.blocks, is_passage, strict=True)
        ]
    ).to(device)
    count = round(share * int(allowed.sum()))
    if not count:
        return context, 0
    cache = copied_cache(model.hf_model.config, [context], model.profile.layouts)
    received = attention_to_context(model, context, final_ids, cache)
    chosen = received.masked_fill(~allowed, -1.0).topk(count).indices.sort().values
    _compute(model, context, cache, chosen)
    layers: Any = cache.layers
    identity = [block.kv.digest for block in context.blocks], list(final_ids), share
    kv = BlockKV(
        keys=tuple(layer.keys[0] for layer in layers),
        values=tuple(layer.values[0] for layer in layers),
        token_ids=torch.tensor(context.token_ids),
        fingerprint=context.blocks[0].kv.fingerprint,
        digest=hashlib.sha256(repr(identity).encode()).hexdigest(),
        handle="",
    )
    return Context((PlacedBlock(kv, 0, 0),)), count


def attention_to_context(
    model: BlockModel,
    context: Context,
    final_ids: Sequence[int],
    cache: ContextCache | None = None,
) -> Tensor:
    """Attention of the final block to each token of the context, ``[tokens]`` float32, summed over
    layers, and averaged over heads and the final block's tokens.

    ``cache``: A copied cache of the context, which is left as it was.
    """
    if cache is None:
        cache = copied_cache(model.hf_model.config, [context], model.profile.layouts)
    enable_relay(model.hf_model)
    scores = ContextAttention(context.num_tokens, model.device)
    cache.attention = scores
    last_logits(model.hf_model, torch.tensor([[*final_ids]]), cache, 1)
    cache.attention = None
    cache.crop(-len(final_ids))
    return scores.total


def _compute(model: BlockModel, context: Context, cache: ContextCache, chosen: Tensor) -> None:
    """Compute the chosen tokens with full attention, and replace their keys and values."""
    ids = torch.tensor(context.token_ids, device=chosen.device)[chosen]
    places = torch.arange(context.num_tokens, device=chosen.device)
    sees = chosen[:, None] >= torch.cat([places, chosen])
    sees[:, chosen] = False  # their keys and values of block mode
    dtype = model.dtype
    bias = torch.zeros(1, 1, *sees.shape, dtype=dtype, device=chosen.device)
    bias.masked_fill_(~sees, torch.finfo(dtype).min)
    with torch.inference_mode():
        model.hf_model(
            input_ids=ids[None],
            attention_mask=bias,
            position_ids=chosen[None],
            past_key_values=cache,
            logits_to_keep=1,
        )
    layers: Any = cache.layers
    for layer in layers:
        for states in (layer.keys, layer.values):
            states[:, :, chosen] = states[:, :, context.num_tokens :]
    cache.crop(-len(chosen))
