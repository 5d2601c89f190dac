"""Engines for tests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.pending import PendingRequest
from blockattn_rag.engine.results import Generation
from blockattn_rag.model import BlockModel
from tests.models import shared_tiny_llama, tiny_model, tiny_tokenizer

Outcome = tuple[str, list[int], str]


def outcome(answer: Generation) -> Outcome:
    return answer.text, answer.token_ids, answer.finish_reason


def answers(
    engine: BlockAttentionEngine, how: str, prompts: Sequence[list[str]], **options: Any
) -> list[Generation]:
    """Answer prompts in one of the ways in ``HOW``."""
    if how == "batch":
        return engine.generate_batch(prompts, **options)
    if how == "alone":
        return [engine.generate(prompt, **options) for prompt in prompts]
    found = []
    for prompt in prompts:
        *chunks, last = engine.stream(prompt, **options)
        assert last.generation is not None
        assert "".join(chunk.text for chunk in chunks) == last.generation.text
        found.append(last.generation)
    return found


HOW = pytest.mark.parametrize("how", ["alone", "batch", "stream"])
MODE = pytest.mark.parametrize("mode", ["block", "full"])


def tuned_model(tokenizer: Any = None, *, letters: str = "", **config: Any) -> BlockModel:
    """Return a tiny Llama marked as block-fine-tuned, which prevents warnings about stock models.
    ``letters``: Characters to restrict answers to, so that they are printable and never end
    early."""
    model: Any = tiny_model("llama", **config)
    tokenizer = tokenizer or tiny_tokenizer()
    if letters:
        tokens = tokenizer.convert_ids_to_tokens(list(range(model.config.vocab_size)))
        with torch.no_grad():
            muted = [index for index, token in enumerate(tokens) if token not in [*letters]]
            model.get_output_embeddings().weight[muted] = 0
    model.config.block_attention = {"test": True}
    return BlockModel(model, tokenizer)


def tuned_engine() -> BlockAttentionEngine:
    """Return an engine over its own tiny Llama, marked as block-fine-tuned."""
    model = BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer())
    model.config.block_attention = {"tuned": True}
    return BlockAttentionEngine(model)


def with_settings(engine: BlockAttentionEngine, **settings: Any) -> BlockAttentionEngine:
    """Return an engine with the same model, store and recipe, but with these settings."""
    return BlockAttentionEngine(engine.model, engine.store, **{"recipe": engine.recipe, **settings})


def batch_sizes(engine: BlockAttentionEngine) -> list[int]:
    """Return a list that records the sizes of all batches of more than one request."""
    sizes: list[int] = []
    answer_batch = engine._runner.answer_batch

    def counted(batch: Sequence[PendingRequest]) -> None:
        if len(batch) > 1:
            sizes.append(len(batch))
        answer_batch(batch)

    engine._runner.answer_batch = counted  # type: ignore[method-assign]
    return sizes


class CountingEngine(BlockAttentionEngine):
    """Engine that records the sizes of its batches of more than one request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batches = batch_sizes(self)
