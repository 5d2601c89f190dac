"""Seconds to the first token, and per token after it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from blockattn_rag.cli.bench.options import (
    BatchSizes,
    Bench,
    BlockSizes,
    BlockTokens,
    CudaGraphs,
    Lengths,
    NewTokens,
    QuestionTokens,
    Repeats,
    measurement,
    numbers,
)
from blockattn_rag.cli.bench.report import column, measured, open_engine, show, spreads
from blockattn_rag.cli.output import progress, working


@measurement
def ttft(
    bench: Bench,
    lengths: Lengths = "512,4096",
    *,
    cuda_graphs: CudaGraphs = False,
    repeats: Repeats = 3,
    block_tokens: BlockTokens = 512,
    question_tokens: QuestionTokens = 50,
) -> None:
    """Time to first token: full prefill, blocks reused by copy and relay, and the floor.

    The floor is the question without any context: no reuse can be faster.
    """
    counts = numbers(lengths, "--lengths")
    sizes = {"block_tokens": block_tokens, "question_tokens": question_tokens}
    with working(bench.as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_ttft

        engine = open_engine(bench, max(counts) + question_tokens, cuda_graphs=cuda_graphs)
        rows = measure_ttft(engine, counts, **sizes, repeats=repeats, on_progress=tick)
    reusing = measured(rows, "copy", "relay")
    cells = {
        "context": column(rows, "length"),
        **spreads(rows, ["full", *reusing, "floor"]),
        **{f"full/{path}": column(rows, f"full_over_{path}", ".1f") for path in reusing},
        "FLOPs ratio": column(rows, "flops_ratio", ".0f"),
    }
    settings = {"repeats": repeats, **sizes}
    show(bench, engine, rows, settings, "Time to first token", cells, x="length")


@measurement
def decode(
    bench: Bench,
    lengths: Lengths = "4096,8192",
    block_tokens: BlockSizes = "128,512",
    *,
    cuda_graphs: CudaGraphs = False,
    new_tokens: NewTokens = 32,
    repeats: Repeats = 3,
) -> None:
    """Seconds per token after the first: full, copy and relay, by context and block size."""
    counts, blocks = numbers(lengths, "--lengths"), numbers(block_tokens, "--block-tokens")
    settings = {"repeats": repeats, "new_tokens": new_tokens}
    with working(bench.as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_decode

        engine = open_engine(bench, max(counts) + 50 + new_tokens, cuda_graphs=cuda_graphs)
        rows = measure_decode(engine, counts, block_tokens=blocks, **settings, on_progress=tick)
    cells = {
        "context": column(rows, "length"),
        "block": column(rows, "block_tokens"),
        **spreads(rows, measured(rows, "full", "copy", "relay")),
        "relay/copy": column(rows, "relay_over_copy", ".2f"),
    }
    title = "Time per token"
    show(bench, engine, rows, settings, title, cells, x="length", series="block_tokens")


@measurement
def batch(
    bench: Bench,
    batch_sizes: BatchSizes = "1,2,4,8",
    length: Annotated[int, typer.Option(min=1, help="Context tokens of each request.")] = 8192,
    *,
    repeats: Repeats = 3,
    block_tokens: BlockTokens = 512,
    question_tokens: QuestionTokens = 50,
) -> None:
    """Time to the first tokens of a batch of unrelated requests, by batch size."""
    counts = numbers(batch_sizes, "--batch-sizes")
    settings: dict[str, Any] = {
        "repeats": repeats,
        "length": length,
        "block_tokens": block_tokens,
        "question_tokens": question_tokens,
    }
    with working(bench.as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_batch

        engine = open_engine(bench, length + question_tokens)
        rows = measure_batch(engine, counts, **settings, on_progress=tick)
    reusing = measured(rows, "copy", "relay", "copy_from_host", "relay_from_host")
    ratios = {path: column(rows, f"full_over_{path}", ".1f") for path in reusing}
    cells = {
        "requests": column(rows, "batch"),
        **spreads(rows, ["full", *reusing]),
        **{f"full/{path.replace('_', ' ')}": ratios[path] for path in reusing},
    }
    title = f"Time to first tokens at {length} tokens of context"
    show(bench, engine, rows, settings, title, cells, x="batch")
