"""Peak memory of a request."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.lab.efficiency.latency import PATHS, on_path, paths_of
from blockattn_rag.lab.efficiency.shapes import random_prompt
from blockattn_rag.lab.efficiency.timing import OnProgress, check_sizes


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
            :func:`.latency.measure_ttft`.
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
