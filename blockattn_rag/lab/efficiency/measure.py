"""Measures requests on every path: times to tokens, alone and in batches, and peak memory."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.lab.efficiency.shapes import check_sizes, prefill_flops, random_prompt
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import BlockPrompt

OnProgress = Callable[[int, int], None]
"""Function of the number of finished runs and the number of all runs."""


class Turns:
    """Times functions in turns, so that disturbances affect all of them. Warms each up once.

    Args:
        repeats: Counted runs of each function.
        total: Number of calls of ``measure``, each with the same number of functions.
        on_progress: Called after each run.
    """

    def __init__(self, repeats: int, total: int, on_progress: OnProgress | None = None) -> None:
        check_sizes(repeats=repeats)
        self._repeats = repeats
        self._total = total
        self._on_progress = on_progress
        self._done = 0

    def measure(self, ways: Mapping[str, Callable[[], float]], unit: str = "s") -> dict[str, Any]:
        """Run each function and summarize its results, without the warm-up.

        Returns:
            Fields of a row: the median ``<name>_<unit>``, ``<name>_min_<unit>`` and
            ``<name>_max_<unit>`` for each function.
        """
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self._repeats + 1):
            for name, way in ways.items():
                found[name].append(way())
                self._done += 1
                if self._on_progress:
                    self._on_progress(self._done, self._total * len(ways) * (self._repeats + 1))
        row = {}
        for name, (_, *counted) in found.items():
            for end, of in (("", statistics.median), ("_min", min), ("_max", max)):
                row[f"{name}{end}_{unit}"] = of(counted)
        return row


PATHS: Mapping[str, Mapping[str, Any]] = {
    # An explicit `do_sample=False` turns off the repetition guard, which the answers of models with
    # random weights would trigger.
    path: {"mode": mode, "do_sample": False}
    for path, mode in {"full": "full", "copy": "block", "relay": "block", "floor": "full"}.items()
}
"""Options of calls on each path. On the floor path, the prompt is the question without context."""


def paths_of(engine: BlockAttentionEngine) -> list[str]:
    """Paths that the model supports for a prompt with context."""
    return ["full", "copy"] + ["relay"] * engine.model.supports_relay


def on_path(engine: BlockAttentionEngine, path: str) -> BlockAttentionEngine:
    """Create an engine with the same model and store that answers on one path.

    The engine uses stored blocks only: a miss is an error.
    """
    if path not in ("copy", "relay"):
        return engine
    return BlockAttentionEngine(
        engine.model,
        engine.store,
        recipe=engine.recipe,
        resident_bytes=0,
        on_miss="error",
        assembly="copy" if path == "copy" else "relay",
    )


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

    Blocks are encoded beforehand and read from the engine's store. A miss is an error.

    Args:
        engine: Engine with a ``shapes.counting_tokenizer`` for the model's vocabulary, a store with
            room for the blocks of the longest context, and ``resident_bytes=0``, so that repeated
            questions are computed again.
        lengths: Context lengths in tokens, without the question.
        block_tokens: Tokens per block.
        question_tokens: Tokens of the final block.
        repeats: Timed runs on each path.
        on_progress: Called with the number of finished runs and the number of all runs.

    Returns:
        One row for each length: ``length`` and ``blocks``; for each path ``<path>_s`` (median,
        seconds), ``<path>_min_s`` and ``<path>_max_s``; for the paths that reuse blocks,
        ``full_over_<path>`` and ``<path>_over_floor``; and the numbers of operations
        ``full_flops``, ``block_flops``, ``flops_ratio`` (full over block) and ``flops_over_floor``
        (block over the question alone).
    """
    check_sizes(block_tokens=block_tokens, question_tokens=question_tokens)
    check_sizes(**{"the shortest length": min(lengths, default=0)})
    config = engine.model.config
    paths = paths_of(engine)
    floor = prefill_flops(config, question_tokens)
    turns = Turns(repeats, len(lengths), on_progress)
    engines = {path: on_path(engine, path) for path in (*paths, "floor")}
    rows = []
    for length in lengths:
        prompt = random_prompt(length, block_tokens, question_tokens, config.vocab_size)
        engine.generate(prompt, max_new_tokens=1)
        ways = {path: partial(_ttft, one, prompt, path) for path, one in engines.items()}
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
    """Measure the time per token after the first token on every path, side by side.

    Args:
        engine, lengths, question_tokens, repeats, on_progress: See :func:`measure_ttft`.
        block_tokens: Block sizes in tokens. Each size gives one row per length.
        new_tokens: Tokens generated in each run, at least 2. The time of the first token is not
            counted. On the relay path, the time of the second token includes joining small blocks.

    Returns:
        One row for each length and block size: ``length``, ``block_tokens``, ``<path>_s`` (median
        seconds per token) with ``<path>_min_s`` and ``<path>_max_s``, and ``relay_over_copy``.
    """
    check_sizes(question_tokens=question_tokens)
    if new_tokens < 2:
        raise ValueError(f"new_tokens must be at least 2, found {new_tokens}")
    check_sizes(**{"the shortest length": min(lengths), "block_tokens": min(block_tokens)})
    turns = Turns(repeats, len(lengths) * len(block_tokens), on_progress)
    engines = {path: on_path(engine, path) for path in paths_of(engine)}
    vocabulary = engine.model.config.vocab_size
    rows = []
    for length in lengths:
        for size in block_tokens:
            prompt = random_prompt(length, size, question_tokens, vocabulary)
            engine.generate(prompt, max_new_tokens=1)
            ways = {
                path: partial(_per_token, one, prompt, path, new_tokens)
                for path, one in engines.items()
            }
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
    """Refuse an answer that ended before ``new_tokens`` tokens, because its time is too short."""
    if stats.generated_tokens < new_tokens:
        raise ValueError(
            f"an answer ended after {stats.generated_tokens} of {new_tokens} tokens: measure a "
            "model without an end token, or one of the shapes"
        )


def measure_batch(
    engine: BlockAttentionEngine,
    batch_sizes: Sequence[int],
    *,
    length: int = 8192,
    block_tokens: int = 512,
    question_tokens: int = 50,
    repeats: int = 3,
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Measure the time to the first tokens of a batch of unrelated requests (TurboRAG, table 4).

    Args:
        engine: See :func:`measure_ttft`; the store must have room for the largest batch's contexts.
        batch_sizes: Numbers of requests per batch.
        length: Context tokens of each request.
        block_tokens, question_tokens, repeats, on_progress: See :func:`measure_ttft`.

    Returns:
        One row for each batch size: ``batch``, ``<path>_s`` (median seconds until every request
        has its first token) with ``<path>_min_s`` and ``<path>_max_s``, and ``full_over_<path>``.
    """
    check_sizes(length=length, block_tokens=block_tokens, batch=min(batch_sizes, default=0))
    check_batches(engine)
    turns = Turns(repeats, len(batch_sizes), on_progress)
    vocabulary = engine.model.config.vocab_size
    prompts = [
        random_prompt(length, block_tokens, question_tokens, vocabulary, seed)
        for seed in range(max(batch_sizes))
    ]
    store_contexts(engine, prompts)
    rows = []
    paths = paths_of(engine)
    engines = {path: on_path(engine, path) for path in paths}
    for batch in batch_sizes:
        ways = {
            path: partial(_first_tokens, one, prompts[:batch], path)
            for path, one in engines.items()
        }
        row = {"batch": batch, "length": length, **turns.measure(ways)}
        row |= {f"full_over_{path}": row["full_s"] / row[f"{path}_s"] for path in paths[1:]}
        rows.append(row)
    return rows


def check_batches(engine: BlockAttentionEngine) -> None:
    """Refuse a model that answers requests one by one, because a batch would not be measured."""
    if not engine.model.batches_exactly(Sampling(max_new_tokens=1)):
        raise ValueError(
            f"{engine.model.name} does not support batches (sliding windows, or a generation "
            "config with penalties or beams); measure `bench ttft` and `bench decode`"
        )


def store_contexts(engine: BlockAttentionEngine, prompts: Sequence[BlockPrompt]) -> None:
    """Encode and store the contexts of prompts."""
    for prompt in prompts:
        engine.generate(prompt, max_new_tokens=1)


def _first_tokens(engine: BlockAttentionEngine, prompts: Sequence[BlockPrompt], path: str) -> float:
    size = len(prompts)
    answers = engine.generate_batch(prompts, batch_size=size, max_new_tokens=1, **PATHS[path])
    return answers[0].stats.ttft_s


def measure_memory(
    engine: BlockAttentionEngine,
    lengths: Sequence[int],
    *,
    block_tokens: int = 512,
    question_tokens: int = 50,
    new_tokens: int = 8,
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Measure the peak memory of a request, from its start to its last token.

    The result is deterministic, because only tensors that PyTorch allocates are counted. Blocks are
    in the store beforehand and are not counted.

    The memory of relay depends on ``block_tokens``, because relay joins small blocks in additional
    tensors (``attention.relay.JoinLimits``). It keeps them from the second token on (on an
    accelerator, from the first token on) until the answer ends.

    Args:
        engine, lengths, block_tokens, question_tokens, on_progress: See
            :func:`measure_ttft`.
        new_tokens: Tokens to generate.

    Returns:
        One row for each length: ``length``; ``<path>_peak_bytes`` for full, copy and relay;
        ``stored_bytes`` of the context's blocks; ``relay_over_copy``.
    """
    check_sizes(block_tokens=block_tokens, **{"the shortest length": min(lengths, default=0)})
    engines = {path: on_path(engine, path) for path in paths_of(engine)}
    vocabulary = engine.model.config.vocab_size
    rows = []
    done = 0
    for length in lengths:
        prompt = random_prompt(length, block_tokens, question_tokens, vocabulary)
        engine.generate(prompt, max_new_tokens=1)
        row: dict[str, Any] = {"length": length}
        for path, one in engines.items():
            work = partial(one.generate, prompt, max_new_tokens=new_tokens, **PATHS[path])
            # The profiler records only this thread. With the lock held, the model runs in it.
            with engine.model.lock:
                row[f"{path}_peak_bytes"] = peak_bytes(work, engine.model.device)
            done += 1
            if on_progress:
                on_progress(done, len(lengths) * len(engines))
        row["stored_bytes"] = length * engine.model.bytes_per_token
        if "relay" in engines:
            row["relay_over_copy"] = row["relay_peak_bytes"] / row["copy_peak_bytes"]
        rows.append(row)
    return rows


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Peak number of bytes of tensors on ``device`` that ``work`` allocates.

    On the CPU, allocations of other threads are not counted.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"memory can be measured on cpu and cuda, found {device.type}")
    work()  # the first run also allocates permanent tensors, which must not be counted
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler's library logs to stderr unless its log level is the highest.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results: Any = profiler.profiler
    held = peak = 0
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def machine(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Describe the machine that results depend on: processor, threads, accelerator, versions.

    ``accelerator`` is the name of ``device``, or None for the CPU.
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "processor": processor(),
        "system": platform.system(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "accelerator": None if device.type == "cpu" else name,
        "versions": {package: metadata.version(package) for package in ("torch", "transformers")},
    }


def processor() -> str:
    """Name of the processor, from ``/proc/cpuinfo`` if it exists."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as listing:
        for line in listing:
            if "model name" in line:
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
