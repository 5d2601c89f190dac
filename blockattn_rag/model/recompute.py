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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import attend, fold_heads
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, PlacedBlock
from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.caches import ContextCache, copied_cache, running_with
from blockattn_rag.model.encoding import logits_to_keep
from blockattn_rag.model.probe import check_ready
from blockattn_rag.model.relay_attention import enable_relay, last_logits

_MOST_SCORES = 1 << 26
"""Attention scores that are in memory at once."""


class _MeasuredAttention:
    """Attention that adds up what each of the first ``tokens`` tokens receives, in ``total``."""

    takes_mask = True

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.total = torch.zeros(tokens, device=device)

    def attend(
        self, _: int, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
    ) -> Tensor:
        """See ``RelayPlan.attend``. Keys and values are those of context and tail."""
        folded, mask = fold_heads(query, mask, key.shape[1])
        keys, outputs = key.float().mT, []
        step = max(1, _MOST_SCORES // (folded.shape[1] * keys.shape[-1]))
        for start in range(0, folded.shape[2], step):
            rows = slice(start, start + step)
            scores = folded[:, :, rows].float() @ keys * scale
            if mask is not None:
                scores = scores.masked_fill_(~mask[:, :, rows], -math.inf)
            weights = scores.softmax(-1)
            self.total += (
                weights[..., : len(self.total)].sum(dim=(0, 1, 2)) / folded[..., 0].numel()
            )
            outputs.append(weights.to(value.dtype) @ value)
        return torch.cat(outputs, dim=2).reshape(*query.shape[:3], -1)


def recompute(
    model: BlockModel,
    context: Context,
    is_passage: Sequence[bool],
    final_ids: Sequence[int],
    share: float,
) -> tuple[Context, int]:
    """Recompute tokens of a context for one question.

    Args:
        model: The model; see ``check_can_recompute``. The caller must hold its lock.
        context: The context, with reordered positions.
        is_passage: Whether each block is a passage, whose tokens may be chosen. Those of the first
            block never are, because they already attend to everything before them.
        final_ids: Token ids of the final block.
        share: Share of the passages' tokens.

    Returns:
        The context as one block of its own, and the number of recomputed tokens. The given context
        and 0 if the share is less than half a token.

    Raises:
        ValueError: the model is in training mode, or autocast is on.
    """
    check_ready(model.hf_model)
    lengths = torch.tensor([block.kv.num_tokens for block in context.blocks], dtype=torch.int64)
    may = torch.tensor([one and place > 0 for place, one in enumerate(is_passage)])
    allowed = may.bool().repeat_interleave(lengths).to(model.device)
    count = round(share * int(allowed.sum()))
    if not count:
        return context, 0
    cache = copied_cache(model.hf_model.config, [context], model.profile.layouts)
    received = attention_to_context(model, context, final_ids, cache)
    chosen = received.masked_fill(~allowed, -1.0).topk(count).indices.sort().values
    _compute(model, context, cache, chosen)
    layers: Any = cache.layers
    identity = [block.kv.digest for block in context.blocks], chosen.tolist()
    kv = BlockKV(
        # Copies, because the cache has room for more tokens.
        keys=tuple(layer.keys[0].clone() for layer in layers),
        values=tuple(layer.values[0].clone() for layer in layers),
        token_ids=torch.tensor(context.token_ids),
        fingerprint=context.blocks[0].kv.fingerprint,
        digest=hashlib.sha256(repr(identity).encode()).hexdigest(),
        handle="",
    )
    return Context((PlacedBlock(kv, 0, 0),)), count


def check_can_recompute(model: BlockModel) -> None:
    """Raise UnsupportedModelError if the model's attention is not plain, as relay requires."""
    if not model.supports_relay:
        raise UnsupportedModelError(
            f"{model.name} cannot recompute tokens: it has sliding windows, soft caps, attention "
            "sinks or its own attention interface; use a recipe with recompute=0"
        )


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
    scores = _MeasuredAttention(context.num_tokens, model.device)
    cache.attention = scores
    last_logits(model.hf_model, torch.tensor([[*final_ids]]), cache, 1)
    cache.attention = None
    cache.crop(-len(final_ids))
    return scores.total


@dataclass(frozen=True)
class _MaskedAttention:
    """Attention with a mask ``[tokens, keys]`` of its own, True where a key is visible."""

    visible: Tensor
    takes_mask = False

    def attend(
        self, _: int, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
    ) -> Tensor:
        """See ``RelayPlan.attend``. Keys and values are those of context and tail."""
        folded, mask = fold_heads(query, self.visible[None, None], key.shape[1])
        output = attend(folded, key, value, scale, mask).output
        return output.reshape(*query.shape[:3], -1).to(query.dtype)


def _compute(model: BlockModel, context: Context, cache: ContextCache, chosen: Tensor) -> None:
    """Compute the chosen tokens with full attention, and replace their keys and values."""
    ids = torch.tensor(context.token_ids, device=chosen.device)[chosen]
    places = torch.arange(context.num_tokens, device=chosen.device)
    sees = chosen[:, None] >= torch.cat([places, chosen])
    sees[:, chosen] = False  # their keys and values of block mode
    cache.attention = _MaskedAttention(sees)
    with torch.inference_mode(), running_with():
        model.hf_model(
            input_ids=ids[None],
            position_ids=chosen[None],
            past_key_values=cache,
            use_cache=True,
            **logits_to_keep(model.hf_model),
        )
    layers: Any = cache.layers
    for layer in layers:
        for states in (layer.keys, layer.values):
            states[:, :, chosen] = states[:, :, context.num_tokens :]
    cache.attention = None
    cache.crop(-len(chosen))
