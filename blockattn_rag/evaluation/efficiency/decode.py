"""Time per generated token by context length and block size: full, copy and relay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.evaluation.efficiency.shapes import random_prompt
from blockattn_rag.evaluation.efficiency.timing import OnProgress, Turns, check_sizes, fields
from blockattn_rag.evaluation.efficiency.ttft import PATHS
from blockattn_rag.prompts.blocks import BlockPrompt


def measure_decode(
    engine: BlockAttentionEngine,
    lengths: Sequence[int],
    *,
    block_tokens: Sequence[int] = (128, 512),
    question_tokens: int = 50,
    new_tokens: int = 32,
    repeats: int = 3,
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Measure how long a token after the first takes on every path, side by side.

    Args:
        engine, lengths, question_tokens, repeats, on_progress: as for :func:`measure_ttft`.
        block_tokens: sizes of blocks, each of which gives a row per length.
        new_tokens: tokens generated in each run, at least 2; the first is not counted, the second
            is: on the relay path it bears the joining of small blocks.

    Returns:
        One row for each length and block size: ``length``, ``block_tokens``, ``<path>_s`` (median
        seconds per token) with ``<path>_min_s`` and ``<path>_max_s``, and ``relay_over_copy``.
    """
    check_sizes(question_tokens=question_tokens, **{"new_tokens less one": new_tokens - 1})
    check_sizes(**{"the shortest length": min(lengths), "block_tokens": min(block_tokens)})
    turns = Turns(repeats, len(lengths) * len(block_tokens), on_progress)
    paths = ["full", "copy"] + ["relay"] * engine.model.supports_relay
    vocabulary = engine.model.config.vocab_size
    rows = []
    for length in lengths:
        for size in block_tokens:
            prompt = random_prompt(length, size, question_tokens, vocabulary)
            engine.generate(prompt, max_new_tokens=1)
            ways = {path: partial(_per_token, engine, prompt, path, new_tokens) for path in paths}
            row: dict[str, Any] = {"length": length, "block_tokens": size}
            row |= fields(turns.measure(ways))
            if "relay" in ways:
                row["relay_over_copy"] = row["relay_s"] / row["copy_s"]
            rows.append(row)
    return rows


def _per_token(
    engine: BlockAttentionEngine, prompt: BlockPrompt, path: str, new_tokens: int
) -> float:
    stats = engine.generate(prompt, max_new_tokens=new_tokens, **PATHS[path]).stats
    check_full_length(stats, new_tokens)
    return (stats.total_s - stats.ttft_s) / (new_tokens - 1)


def check_full_length(stats: ReuseStats, new_tokens: int) -> None:
    """Refuse an answer that ended early: its time is not that of ``new_tokens`` tokens."""
    if stats.generated_tokens < new_tokens:
        raise ValueError(
            f"an answer ended after {stats.generated_tokens} of {new_tokens} tokens: measure a "
            "model without an end token, or one of the shapes"
        )
