"""Times of one request by context length: to its first token, and of each further one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.lab.efficiency.shapes import prefill_flops, random_prompt
from blockattn_rag.lab.efficiency.timing import OnProgress, Turns, check_sizes
from blockattn_rag.prompts.blocks import BlockPrompt

_ANY_TEXT: Mapping[str, Any] = {"do_sample": False}
"""Still greedy, and given explicitly: an answer that repeats itself goes on to its full length, as
those of random weights do."""

PATHS: Mapping[str, Mapping[str, Any]] = {
    "full": {"mode": "full", **_ANY_TEXT},
    "copy": {"mode": "block", "on_miss": "error", "assembly": "copy", **_ANY_TEXT},
    "relay": {"mode": "block", "on_miss": "error", "assembly": "relay", **_ANY_TEXT},
    "floor": {"mode": "full", **_ANY_TEXT},
}
"""How the engine is called on each path. The floor's prompt is the question without context."""


def paths_of(engine: BlockAttentionEngine) -> list[str]:
    """The paths of a prompt with a context, as far as the model has them."""
    return ["full", "copy"] + ["relay"] * engine.model.supports_relay


def measure_ttft(
    engine: BlockAttentionEngine,
    lengths: Sequence[int],
    *,
    block_tokens: int = 512,
    question_tokens: int = 50,
    repeats: int = 3,
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Measure the time from a request to its first token on every path, side by side.

    Blocks are encoded beforehand and lie in the engine's store; a miss would be an error.

    Args:
        engine: its tokenizer must be ``shapes.counting_tokenizer`` of the model's vocabulary, its
            store must have room for the blocks of the longest context, and its ``resident_bytes``
            be 0: otherwise a question that comes again is not computed again.
        lengths: context lengths in tokens, the question not counted.
        block_tokens: tokens of a block.
        question_tokens: tokens of the final block.
        repeats: timed runs on each path.
        on_progress: called with runs done and all runs.

    Returns:
        One row for each length: ``length`` and ``blocks``; for each path ``<path>_s`` (median,
        seconds), ``<path>_min_s`` and ``<path>_max_s``; for the paths that reuse,
        ``full_over_<path>`` and ``<path>_over_floor``; and the operations ``full_flops``,
        ``block_flops``, ``flops_ratio`` (full over block) and ``flops_over_floor`` (block over
        the question alone).
    """
    check_sizes(block_tokens=block_tokens, question_tokens=question_tokens)
    check_sizes(**{"the shortest length": min(lengths, default=0)})
    config = engine.model.config
    paths = paths_of(engine)
    floor = prefill_flops(config, question_tokens)
    turns = Turns(repeats, len(lengths), on_progress)
    rows = []
    for length in lengths:
        prompt = random_prompt(length, block_tokens, question_tokens, config.vocab_size)
        engine.generate(prompt, max_new_tokens=1)
        ways = {path: partial(_ttft, engine, prompt, path) for path in (*paths, "floor")}
        row = {"length": length, "blocks": len(prompt.context), **turns.measure(ways)}
        for path in paths[1:]:
            row[f"full_over_{path}"] = row["full_s"] / row[f"{path}_s"]
            row[f"{path}_over_floor"] = row[f"{path}_s"] / row["floor_s"]
        full = prefill_flops(config, length + question_tokens)
        block = prefill_flops(config, question_tokens, length)
        row |= {"full_flops": full, "block_flops": block}
        rows.append(row | {"flops_ratio": full / block, "flops_over_floor": block / floor})
    return rows


def _ttft(engine: BlockAttentionEngine, prompt: BlockPrompt, path: str) -> float:
    asked = BlockPrompt((), prompt.final) if path == "floor" else prompt
    return engine.generate(asked, max_new_tokens=1, **PATHS[path]).stats.ttft_s


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
    paths = paths_of(engine)
    vocabulary = engine.model.config.vocab_size
    rows = []
    for length in lengths:
        for size in block_tokens:
            prompt = random_prompt(length, size, question_tokens, vocabulary)
            engine.generate(prompt, max_new_tokens=1)
            ways = {path: partial(_per_token, engine, prompt, path, new_tokens) for path in paths}
            row = {"length": length, "block_tokens": size, **turns.measure(ways)}
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
