"""Profile the kernels of the slowest step of relay attention, and recommend a change.

The slowest step is the one with the largest ratio of time to limit among the prefill and decoding
steps measured by ``first_token``. Without results, it is the first token after 32,768 tokens.
Kernels are grouped by name, and the advice depends on each group's share of the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from first_token import BLOCK_TOKENS, LENGTHS, SHAPES, Prompt, limit_s
from harness import Campaign, Case, Record, elapsed_s, results_of
from torch.profiler import ProfilerActivity, profile

from blockattn_rag.model import BlockModel

TOP = 15
GROUPS: Mapping[str, str] = {  # The first matching pattern determines a kernel's group.
    "attention": r"flash|fmha|attention|attn",
    "matrix products": r"gemm|gemv|nvjet|cublas|cutlass|splitk|xmma|addmm|aten::mm|linear|matmul",
    "copies": r"memcpy|memset|copy|catarray|aten::cat|index|gather|scatter",
    "elementwise": r"",
}


class Advice(NamedTuple):
    """Change to recommend if a group's share of the time exceeds ``limit``."""

    share: str
    limit: float
    change: str


ADVICE = (
    Advice("idle", 0.3, "The device waits for launches: capture the step in a CUDA graph, or make "
           "fewer calls for each layer."),
    Advice("copies", 0.15, "Keys and values are copied: join fewer blocks (the constants of "
           "blockattn_rag.attention), or read blocks in place by a page table."),
    Advice("elementwise", 0.2, "Rotations, merges and norms take separate kernels: fuse them, by "
           "a Triton kernel for rotating queries and merging parts."),
    Advice("attention", 0.4, "Attention dominates: a kernel that splits keys among processors "
           "if few of them are busy; else fewer bytes (int8 keys and values)."),
    Advice("matrix products", 0.7, "Weights dominate: at their limit only quantized weights or "
           "larger batches help; above it, look at the shapes of the products."),
)  # fmt: skip


class Slowest(NamedTuple):
    shape: str
    length: int
    step: str
    """``forward`` or ``decode``."""
    over_limit: float | None


def cases(campaign: Campaign) -> Iterator[Case]:
    chosen = slowest(results_of((campaign.resume, campaign.out), "first_token"))
    if campaign.dry:
        chosen = chosen._replace(shape="tiny", length=64)
    yield Case(f"{chosen.shape}/{chosen.length}/{chosen.step}", partial(profiled, campaign, chosen))


def slowest(results: Mapping[str, Record]) -> Slowest:
    """Return the step of relay attention with the largest ratio of time to limit."""
    found = []
    for name, row in results.items():
        shape, length, step = name.split("/")
        limit = {"forward": row.get("relay_limit_s"), "decode": row.get("limit_s")}.get(step)
        if limit:
            found.append(Slowest(shape, int(length), step, row["relay_s"] / limit))
    default = Slowest(SHAPES[0], LENGTHS[0], "forward", None)
    return max(found, key=lambda one: one.over_limit or 0.0, default=default)


def profiled(campaign: Campaign, chosen: Slowest) -> Record:
    """Profile a step. The result has ``total_s``, ``limit_s``, ``kernels`` (``name``, ``group``,
    ``s``, ``calls``), ``shares`` of the groups and of idle time, ``launches``, and ``advice``."""
    model = campaign.model(chosen.shape, max(LENGTHS) + 1024)
    work = step_of(model, chosen)
    for _ in range(2):
        work()
    total_s = elapsed_s(work, model.device)  # without the profiler's overhead
    is_cuda = model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        work()
        if is_cuda:
            torch.cuda.synchronize()
    kernels = []
    events: Any = profiler.key_averages()
    for event in events:
        if is_cuda and event.device_type.name != "CUDA":
            continue  # Count the kernels that the graph launches instead.
        taken_us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        kernel = {"name": event.key, "group": group_of(event.key)}
        kernels.append(kernel | {"s": taken_us / 1e6, "calls": event.count})
    kernels.sort(key=lambda kernel: -kernel["s"])
    shares = shares_of(kernels, total_s)
    return {
        "total_s": total_s,
        "limit_s": limit_s(model, campaign.ceilings, "relay", chosen.length),
        "over_limit": chosen.over_limit,
        "kernels": kernels[:TOP],
        "shares": shares,
        "launches": sum(kernel["calls"] for kernel in kernels),
        "advice": [one.change for one in ADVICE if shares.get(one.share, 0.0) > one.limit],
    }


def step_of(model: BlockModel, chosen: Slowest) -> Callable[[], object]:
    """Return a function that computes the first token on the relay path, or a later token."""
    prompt = Prompt.drawn(model, chosen.length, min(BLOCK_TOKENS, chosen.length // 2))
    if chosen.step == "forward":
        return partial(prompt.answer, model, "relay")
    cache = model.cache_for(prompt.context, assembly="relay")
    model.next_logits(prompt.question, cache)
    return partial(model.next_logits, torch.tensor([[1]]), cache)


def group_of(kernel: str) -> str:
    return next(name for name, form in GROUPS.items() if re.search(form, kernel.lower()))


def shares_of(kernels: list[Record], total_s: float) -> dict[str, float]:
    """Return the share of the step's time by group. ``idle`` is the time when no kernel runs."""
    shares = dict.fromkeys((*GROUPS, "idle"), 0.0)
    for kernel in kernels:
        shares[kernel["group"]] += kernel["s"] / total_s
    shares["idle"] = max(0.0, 1 - sum(shares.values()))
    return shares
