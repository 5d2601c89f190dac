"""Time of the ways to attend on the CPU, beside each constant of ``attention/tuning.py``.

    python benchmarks/attention.py > benchmarks/results/attention.json

Shapes are those of one layer of a 135M model: 9 heads in 3 groups, head size 64. A gain above 1
means that the way which the constant chooses is faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from packing import median_s  # the script beside this one
from torch import Tensor

from blockattn_rag.attention.kernels import attend_fused
from blockattn_rag.attention.relay import RelayPlan
from blockattn_rag.attention.tuning import CPU, Tuning
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, assemble, place
from blockattn_rag.kv.rope import RotaryLayout
from blockattn_rag.lab.efficiency import machine

HEADS, KV_HEADS, SIZE = 9, 3, 64
LAYOUT = RotaryLayout(10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE), "half")


def context_of(blocks: int, tokens: int) -> Context:
    def states() -> tuple[Tensor, ...]:
        return (torch.randn(KV_HEADS, tokens, SIZE),)

    ids = torch.zeros(tokens, dtype=torch.long)
    return place([BlockKV(states(), states(), ids, "", str(i), "") for i in range(blocks)])


def relay_s(context: Context, query_tokens: int, tuning: Tuning) -> float:
    """Seconds of one layer, segments joined beforehand."""
    plan = RelayPlan([context], [LAYOUT], torch.device("cpu"), tuning=tuning)
    query = torch.randn(1, HEADS, query_tokens, SIZE)
    tail = (
        torch.randn(1, KV_HEADS, query_tokens, SIZE),
        torch.randn(1, KV_HEADS, query_tokens, SIZE),
    )
    mask = torch.ones(1, 1, query_tokens, query_tokens, dtype=torch.bool).tril()
    seen = mask if query_tokens > 1 else None
    return median_s(lambda: plan.attend(0, query, *tail, 0.125, seen))


def assemble_all(context: Context) -> tuple[Tensor, Tensor]:
    ((key, value),) = assemble(context, [LAYOUT])
    return key[None], value[None]


def attend_copy(context: Context, query: Tensor) -> object:
    return attend_fused(query, *assemble_all(context), 0.125)


def compared(case: dict[str, Any], chosen_s: float, other_s: float) -> dict[str, Any]:
    return case | {"chosen_s": chosen_s, "other_s": other_s, "gain": other_s / chosen_s}


def joined() -> Iterator[dict[str, Any]]:
    """Joined blocks against blocks one by one, without and with the time of joining, which a prompt
    pays in one pass and an answer once for all its tokens (``join_*_tokens``)."""
    for block_tokens in (16, 32, 64, 128, 256, 512):
        context = context_of(2048 // block_tokens, block_tokens)
        join_s = median_s(partial(assemble_all, context))
        for query_tokens in (1, 50):
            tunings = [replace(CPU, join_prefill_tokens=n, join_decode_tokens=n) for n in (1024, 0)]
            times = [relay_s(context, query_tokens, tuning) for tuning in tunings]
            case = {"block_tokens": block_tokens, "query_tokens": query_tokens, "join_s": join_s}
            yield compared(case, *times)


def final() -> Iterator[dict[str, Any]]:
    """Relay against rotating and joining all keys (``relay_final_tokens``)."""
    context = context_of(8, 512)
    for tokens in (50, 256, 1024, 2048):
        query = torch.randn(1, KV_HEADS, HEADS // KV_HEADS * tokens, SIZE)
        copy_s = median_s(partial(attend_copy, context, query))
        yield compared({"final_tokens": tokens}, relay_s(context, tokens, CPU), copy_s)


if __name__ == "__main__":
    cases: list[Callable[[], Iterator[dict[str, Any]]]]
    cases = [joined, final]
    with torch.inference_mode():
        rows = {case.__name__: list(case()) for case in cases}
    about = {"model": "one layer of 135M", "dtype": "float32", "device": "cpu"}
    print(json.dumps({**about, "machine": machine(torch.device("cpu")), **rows}, indent=2))
