"""Shared code of the benchmarks: alternating runs, paths, peak memory, machine details."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import BlockPrompt


def check_sizes(**sizes: int) -> None:
    """Raise ``ValueError`` for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"Expected {name} of at least 1, found {value}.")


def in_turns(
    ways: Mapping[str, Callable[[], float]], repeats: int, unit: str = "s"
) -> dict[str, float]:
    """Alternate between functions, so that other load affects all of them. Each is warmed up once.

    Returns:
        Fields of a row: the median ``<name>_<unit>``, the minimum ``<name>_min_<unit>`` and the
        maximum ``<name>_max_<unit>`` of each function's results, without the warm-up.
    """
    check_sizes(repeats=repeats)
    results: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            results[name].append(way())
    row = {}
    for name, (_, *counted) in results.items():
        for end, of in (("", statistics.median), ("_min", min), ("_max", max)):
            row[f"{name}{end}_{unit}"] = of(counted)
    return row


PATHS: Mapping[str, Mapping[str, Any]] = {
    # An explicit `do_sample=False` disables the repetition check, which models with random weights
    # would trigger.
    path: {"mode": "full" if path == "full" else "block", "do_sample": False}
    for path in ("full", "copy", "relay", "block", "floor")
}
"""Call options for each path. ``block``: the path that the engine chooses. ``floor``: the prompt
without its context."""


def paths_of(engine: BlockAttentionEngine) -> list[str]:
    """Return the paths that the model supports for a prompt with context."""
    return ["full", "copy"] + ["relay"] * engine.model.supports_relay


def on_path(engine: BlockAttentionEngine, path: str) -> BlockAttentionEngine:
    """Create an engine with the same model and store that uses only one path.

    The engine uses only stored blocks: a miss raises an error.
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


def check_full_length(stats: ReuseStats, new_tokens: int) -> None:
    """Raise ``ValueError`` for an answer of fewer than ``new_tokens`` tokens, because its time is
    too short."""
    if stats.generated_tokens < new_tokens:
        raise ValueError(
            f"Found an answer of {stats.generated_tokens} tokens, expected {new_tokens}: measure a "
            "model without an end token, or one of the shapes."
        )


def check_batches(engine: BlockAttentionEngine) -> None:
    """Raise ``ValueError`` for a model that does not support batches."""
    if not engine.model.batches_exactly(Sampling(max_new_tokens=1)):
        raise ValueError(
            f"{engine.model.name} does not support batches (sliding windows, or a generation "
            "config with penalties or beams): use `ttft` and `decode` instead."
        )


def store_contexts(engine: BlockAttentionEngine, prompts: Sequence[BlockPrompt]) -> None:
    """Encode the context blocks of prompts, and store them."""
    for prompt in prompts:
        engine.generate(prompt, max_new_tokens=1)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the peak number of bytes that ``work`` allocates for tensors on ``device``.

    On the CPU, allocations in other threads are not counted.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"Memory can be measured on cpu and cuda, found {device.type}.")
    work()  # The first run also allocates tensors that are kept, which must not be counted.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler's library logs to stderr unless its log level is set to the maximum.
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
    """Return details of the machine: processor, threads, accelerator, versions.

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
    """Return the name of the processor, from ``/proc/cpuinfo`` if it exists."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as listing:
        for line in listing:
            if "model name" in line:
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
