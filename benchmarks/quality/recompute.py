"""Baseline: recompute a share of the passages' tokens with the question, chosen by its attention.

The idea of CacheBlend, ProphetKV and QCFuse, in its most exact form: the chosen tokens attend to
everything before them, as in full attention, and the question attends to their new keys and values.
All other tokens keep those of block mode. Written for quality, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from blockattn_rag.engine.fetcher import BlockFetcher
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv.context import Context, place
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import BlockPrompt


class Recomputation:
    """A prompt for which tokens can be recomputed. Not for models with sliding windows.

    Args:
        model: The model.
        fetcher: Provides the KV of the prompt's blocks.
        prompt: The prompt.
        recipe: Recipe of the blocks. It promotes no passage.
    """

    def __init__(
        self, model: BlockModel, fetcher: BlockFetcher, prompt: BlockPrompt, recipe: Recipe
    ) -> None:
        self._model = model
        ids = model.tokenizer.prompt_ids(prompt)
        self._final = ids.final
        self._tokens = torch.tensor([token for block in ids.context for token in block])
        wanted = fetcher.wanted(
            prompt.context, as_prompt=True, recipe=recipe, fingerprint=model.fingerprint
        )
        self._placed = place(fetcher.fetch(wanted).blocks)
        # Tokens of the system block are not passages, and so are never chosen.
        self._is_passage = torch.tensor(
            [
                block.is_passage
                for block, tokens in zip(prompt.context, ids.context, strict=True)
                for _ in tokens
            ]
        )
        self._scores = attention_to_context(model, self._placed, self._final)

    def chosen(self, share: float) -> Tensor:
        """Sorted indices ``[chosen]`` of the passage tokens that the question attends to most."""
        count = round(share * int(self._is_passage.sum()))
        scores = self._scores.masked_fill(~self._is_passage, -1.0)
        return scores.topk(count).indices.sort().values

    def run(self, share: float) -> Recomputed:
        """Recompute a share of the passages' tokens, and prefill the question."""
        chosen, context = self.chosen(share), len(self._tokens)
        cache, hf_model = self._model.cache_for(self._placed), self._model.hf_model
        ids = torch.cat([self._tokens[chosen], torch.tensor(self._final)])
        positions = torch.cat([chosen, torch.arange(context, context + len(self._final))])
        keys = torch.cat([torch.arange(context), positions])
        mask = positions[:, None] >= keys
        mask[:, chosen] = False  # the recomputed tokens' keys and values of block mode
        bias = torch.zeros(1, 1, *mask.shape, dtype=hf_model.dtype)
        bias.masked_fill_(~mask, torch.finfo(hf_model.dtype).min)
        with torch.inference_mode():
            out = hf_model(
                input_ids=ids[None],
                attention_mask=bias,
                position_ids=positions[None],
                past_key_values=cache,
                logits_to_keep=1,
            )
        kept = torch.ones(len(keys), dtype=torch.bool)
        kept[chosen] = False
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        return Recomputed(self._model, cache, out.logits[0, -1], int(positions[-1]) + 1, len(ids))


def attention_to_context(model: BlockModel, context: Context, final_ids: Sequence[int]) -> Tensor:
    """Attention of the question to each context token: ``[context tokens]``, mean over layers,
    heads and question tokens."""
    hf_model = model.hf_model
    before = hf_model.config._attn_implementation
    hf_model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = hf_model(
                input_ids=torch.tensor([final_ids]),
                past_key_values=model.cache_for(context),
                output_attentions=True,
            )
    finally:
        hf_model.set_attn_implementation(before)
    shares = torch.stack([layer[0].mean(dim=(0, 1)) for layer in out.attentions])
    return shares.mean(0)[: context.num_tokens]


@dataclass(slots=True)
class Recomputed:
    """A prefilled prompt: its cache, the logits ``[vocab]`` of the first token, and the position
    of that token."""

    model: BlockModel
    cache: DynamicCache
    logits: Tensor
    position: int
    computed_tokens: int

    def answer_logits(self, answer: Sequence[int]) -> Tensor:
        """Logits ``[answer tokens, vocab]`` at each token of a given answer. Leaves the cache as
        it was."""
        rows = [self.logits[None]]
        if given := list(answer[:-1]):
            rows.append(self._forward(given))
            self.cache.crop(-len(given))
        return torch.cat(rows)

    def generate(self, max_new_tokens: int) -> list[int]:
        """The greedy answer. Extends the cache."""
        answer = [int(self.logits.argmax())]
        while len(answer) < max_new_tokens and answer[-1] not in self.model.end_token_ids:
            logits = self._forward(answer[-1:], offset=len(answer) - 1)
            answer.append(int(logits[-1].argmax()))
        return answer

    def _forward(self, ids: Sequence[int], offset: int = 0) -> Tensor:
        start = self.position + offset
        with torch.inference_mode():
            out = self.model.hf_model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.arange(start, start + len(ids))[None],
                past_key_values=self.cache,
            )
        return out.logits[0]
