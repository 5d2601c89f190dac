"""Sparse recomputation, the baseline: some tokens of each reused passage are computed anew.

What EPIC (2410.15332) and CacheBlend (2405.16444) do, with the first tokens of each passage and an
exact mask: in one forward with the final block, recomputed tokens attend to every token before
them in the prompt, to the stored keys and values of those that are not computed anew. Written for
comparisons alone; it reads stored blocks as any request does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.kv.context import Context
from blockattn_rag.prompts.blocks import BlockPrompt


def recomputed_places(context: Context, first_tokens: int) -> Tensor:
    """Positions in the prompt of the first tokens of each block but the first, int64 ``[n]``."""
    return torch.cat(
        [
            torch.arange(block.start, block.start + min(first_tokens, block.kv.num_tokens))
            for block in context.blocks[1:]
        ]
        or [torch.empty(0, dtype=torch.int64)]
    )


def recomputed_logits(
    engine: BlockAttentionEngine,
    prompt: BlockPrompt,
    answer: Sequence[int],
    options: GenerateOptions,
    first_tokens: int,
) -> Tensor:
    """What the model predicts at each token of an answer: ``[answer tokens, vocab]``.

    Args:
        engine: the model and its store; absent blocks are computed.
        prompt: with a context of at least one block.
        answer: token ids.
        options: how the blocks were encoded, and their positions.
        first_tokens: tokens computed anew of each block but the first; with as many as the longest
            block has, this is full attention.
    """
    model = engine.model
    prepared = engine._runner.prepare(prompt, options)
    context = prepared.context
    assert context is not None
    anew = recomputed_places(context, first_tokens)
    cache = model.cache_for(context)
    assert cache is not None
    kept = torch.ones(context.num_tokens, dtype=torch.bool)
    kept[anew] = False
    reused = kept.nonzero().flatten()
    ids = [prepared.context_ids[place] for place in anew.tolist()]
    ids += [*prepared.final_ids, *answer[:-1]]
    after = torch.arange(len(ids) - len(anew)) + context.num_tokens
    positions = torch.cat([anew, after])
    mask = torch.cat([reused, positions])[None] <= positions[:, None]
    with model.lock, torch.inference_mode():
        out = model.hf_model(
            torch.tensor([ids], device=model.device),
            past_key_values=_only(cache, reused.to(model.device)),
            position_ids=positions[None].to(model.device),
            attention_mask=mask[None, None].to(model.device),
            logits_to_keep=len(answer),
        )
    logits: Tensor = out.logits[0]
    return logits


def _only(cache: DynamicCache, places: Tensor) -> DynamicCache:
    """A cache of some tokens of another one."""
    rest = DynamicCache()
    for index, layer in enumerate(cache.layers):
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        rest.update(layer.keys[:, :, places], layer.values[:, :, places], index)
    return rest
