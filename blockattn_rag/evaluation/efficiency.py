"""Time to first token by context length: full prefill, reuse, and the question alone."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from blockattn_rag.blocks import BlockPrompt
from blockattn_rag.evaluation.shapes import prefill_flops, random_prompt

if TYPE_CHECKING:
    from blockattn_rag.engine import BlockAttentionEngine

PATHS: Mapping[str, Mapping[str, Any]] = {
    "full": {"mode": "full"},
    "copy": {"mode": "block", "on_miss": "error", "assembly": "copy"},
    "relay": {"mode": "block", "on_miss": "error", "assembly": "relay"},
    "floor": {"mode": "full"},
}
"""How the engine is called on each path. The floor's prompt is the question without context."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of several repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        return cls(statistics.median(times), min(times), max(times))


def measure_ttft(
    engine: BlockAttentionEngine,
    lengths: Sequence[int],
    *,
    block_tokens: int = 512,
    question_tokens: int = 50,
    repeats: int = 3,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure the time from a request to its first token on every path, side by side.

    Blocks are encoded beforehand and lie in the engine's store; a miss would be an error. All
    paths run once for warming up and then take turns, so that a disturbance hits all of them.

    Args:
        engine: its tokenizer must be ``shapes.counting_tokenizer`` of the model's vocabulary, and
            its store must have room for the blocks of the longest context.
        lengths: context lengths in tokens, the question not counted.
        block_tokens: tokens of a block.
        question_tokens: tokens of the final block.
        repeats: timed runs on each path.
        on_progress: called with runs done and all runs.

    Returns:
        One row for each length: ``length`` and ``blocks``; for each path ``<path>_s`` (median,
        seconds), ``<path>_min_s`` and ``<path>_max_s``; for the paths that reuse,
        ``full_over_<path>`` and ``<path>_over_floor``; and the operations ``full_flops``,
        ``block_flops``, ``flops_ratio`` (full over block).
    """
    sizes = {"block_tokens": block_tokens, "question_tokens": question_tokens, "repeats": repeats}
    for name, value in {**sizes, "the shortest length": min(lengths, default=0)}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}")
    config = engine.model.config
    paths = [path for path in PATHS if path != "relay" or engine.model.supports_relay]
    rows, total = [], len(lengths) * (repeats + 1) * len(paths)
    for number, length in enumerate(lengths):
        prompt = random_prompt(length, block_tokens, question_tokens, config.vocab_size)
        engine.generate(prompt, max_new_tokens=1)
        times: dict[str, list[float]] = {path: [] for path in paths}
        for repeat in range(repeats + 1):
            for step, path in enumerate(paths):
                times[path].append(_ttft(engine, prompt, path))
                if on_progress:
                    done = (number * (repeats + 1) + repeat) * len(paths) + step + 1
                    on_progress(done, total)
        spreads = {path: Spread.of(values[1:]) for path, values in times.items()}
        rows.append(_row(config, length, len(prompt.context), question_tokens, spreads))
    return rows


def _ttft(engine: BlockAttentionEngine, prompt: BlockPrompt, path: str) -> float:
    asked = BlockPrompt((), prompt.final) if path == "floor" else prompt
    return engine.generate(asked, max_new_tokens=1, **PATHS[path]).stats.ttft_s


def _row(
    config: Any, length: int, blocks: int, question_tokens: int, spreads: Mapping[str, Spread]
) -> dict[str, Any]:
    row: dict[str, Any] = {"length": length, "blocks": blocks}
    for path, spread in spreads.items():
        row |= {
            f"{path}_s": spread.median,
            f"{path}_min_s": spread.low,
            f"{path}_max_s": spread.high,
        }
    full = prefill_flops(config, length + question_tokens)
    block = prefill_flops(config, question_tokens, length)
    for path in spreads.keys() - {"full", "floor"}:
        row[f"full_over_{path}"] = row["full_s"] / row[f"{path}_s"]
        row[f"{path}_over_floor"] = row[f"{path}_s"] / row["floor_s"]
    return row | {"full_flops": full, "block_flops": block, "flops_ratio": full / block}


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, threads, accelerator, versions."""
    import torch

    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {
        "processor": platform.processor() or platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
    }
