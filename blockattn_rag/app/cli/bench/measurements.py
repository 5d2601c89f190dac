"""The measurements: times to tokens, tokens per second, and bytes of a request."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from blockattn_rag.app.cli.bench.options import (
    BatchSizes,
    Bench,
    BlockSizes,
    BlockTokens,
    Lengths,
    NewTokens,
    QuestionTokens,
    Repeats,
    measurement,
    numbers,
)
from blockattn_rag.app.cli.bench.report import column, measured, measuring, show, spreads
from blockattn_rag.app.cli.figures import size


@measurement
def ttft(
    bench: Bench,
    lengths: Lengths = "512,4096",
    *,
    repeats: Repeats = 3,
    block_tokens: BlockTokens = 512,
    question_tokens: QuestionTokens = 50,
) -> None:
    """Time to first token: full prefill, blocks reused by copy and relay, and the floor.

    The floor is the question without any context: no reuse can be faster.
    """
    counts = numbers(lengths, "--lengths")
    sizes = {"block_tokens": block_tokens, "question_tokens": question_tokens}
    settings = {"repeats": repeats, **sizes}
    with measuring(bench, max(counts) + question_tokens) as (engine, tick):
        from blockattn_rag.lab.efficiency import measure_ttft

        rows = measure_ttft(engine, counts, **settings, on_progress=tick)
    reusing = measured(rows, "copy", "relay")
    cells = {
        "context": column(rows, "length"),
        **spreads(rows, ["full", *reusing, "floor"]),
        **{f"full/{path}": column(rows, f"full_over_{path}", ".1f") for path in reusing},
        "FLOPs ratio": column(rows, "flops_ratio", ".0f"),
    }
    show(bench, engine, rows, settings, "Time to first token", cells, x="length")


@measurement
def decode(
    bench: Bench,
    lengths: Lengths = "4096,8192",
    block_tokens: BlockSizes = "128,512",
    *,
    new_tokens: NewTokens = 32,
    repeats: Repeats = 3,
) -> None:
    """Seconds per token after the first: full, copy and relay, by context and block size."""
    counts, blocks = numbers(lengths, "--lengths"), numbers(block_tokens, "--block-tokens")
    settings = {"repeats": repeats, "new_tokens": new_tokens}
    with measuring(bench, max(counts) + 50 + new_tokens) as (engine, tick):
        from blockattn_rag.lab.efficiency import measure_decode

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
    sizes = {"length": length, "block_tokens": block_tokens, "question_tokens": question_tokens}
    settings: dict[str, Any] = {"repeats": repeats, **sizes}
    with measuring(bench, length + question_tokens) as (engine, tick):
        from blockattn_rag.lab.efficiency import measure_batch

        rows = measure_batch(engine, counts, **settings, on_progress=tick)
    reusing = measured(rows, "copy", "relay")
    ratios = {path: column(rows, f"full_over_{path}", ".1f") for path in reusing}
    cells = {
        "requests": column(rows, "batch"),
        **spreads(rows, ["full", *reusing]),
        **{f"full/{path}": ratios[path] for path in reusing},
    }
    title = f"Time to first tokens at {length} tokens of context"
    show(bench, engine, rows, settings, title, cells, x="batch")


@measurement
def shared(
    bench: Bench,
    batch_sizes: BatchSizes = "1,8,32",
    system_tokens: Annotated[
        str, typer.Option(help="Tokens of the shared system prompt, with commas.")
    ] = "512,1024,2048",
    context_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a request's own.")] = 128,
    new_tokens: NewTokens = 32,
    *,
    repeats: Repeats = 3,
) -> None:
    """Tokens per second of requests that share a system prompt, with and without sharing it."""
    counts = numbers(batch_sizes, "--batch-sizes")
    systems = numbers(system_tokens, "--system-tokens")
    settings = {"repeats": repeats, "context_tokens": context_tokens, "new_tokens": new_tokens}
    with measuring(bench, max(systems) + context_tokens + 16 + new_tokens) as (engine, tick):
        from blockattn_rag.lab.efficiency import measure_shared

        rows = measure_shared(engine, counts, system_tokens=systems, **settings, on_progress=tick)
    cells = {
        "system": column(rows, "system_tokens"),
        "requests": column(rows, "batch"),
        "unshared": column(rows, "unshared_tokens_per_s", ".1f"),
        "shared": column(rows, "shared_tokens_per_s", ".1f"),
        "gain": column(rows, "gain", ".2f"),
        "decode gain": column(rows, "decode_gain", ".2f"),
        "equation 10": column(rows, "bytes_ratio", ".1f"),
    }
    title, unit = "Tokens per second", "tokens_per_s"
    show(bench, engine, rows, settings, title, cells, x="batch", unit=unit, series="system_tokens")


@measurement
def ingest(
    bench: Bench,
    block_tokens: BlockSizes = "64,128,512",
    total_tokens: Annotated[int, typer.Option(min=1, help="Tokens encoded in one run.")] = 8192,
    *,
    repeats: Repeats = 3,
) -> None:
    """Tokens per second of encoding blocks, beside a plain batched forward."""
    counts = numbers(block_tokens, "--block-tokens")
    settings = {"repeats": repeats, "total_tokens": total_tokens}
    with measuring(bench, 2 * max(counts)) as (engine, tick):
        from blockattn_rag.lab.efficiency import measure_ingest

        rows = measure_ingest(engine.model, counts, **settings, on_progress=tick)
    cells = {
        "block": column(rows, "block_tokens"),
        "encoding": column(rows, "encode_tokens_per_s", ".0f"),
        "plain forward": column(rows, "plain_tokens_per_s", ".0f"),
        "encoding/plain": column(rows, "encode_over_plain", ".2f"),
        "stored per token": [size(row["bytes_per_token"]) for row in rows],
    }
    title, unit = "Tokens per second", "tokens_per_s"
    show(bench, engine, rows, settings, title, cells, x="block_tokens", unit=unit)


@measurement
def memory(
    bench: Bench,
    lengths: Lengths = "2048,8192",
    *,
    block_tokens: BlockTokens = 512,
    question_tokens: QuestionTokens = 50,
) -> None:
    """Peak memory of one more request, beside weights and stored blocks."""
    counts = numbers(lengths, "--lengths")
    settings = {"block_tokens": block_tokens, "question_tokens": question_tokens}
    with measuring(bench, max(counts) + question_tokens) as (engine, tick):
        from blockattn_rag.lab.efficiency import measure_memory

        rows = measure_memory(engine, counts, **settings, on_progress=tick)
    paths = measured(rows, "full", "copy", "relay", unit="peak_bytes")
    cells = {
        "context": column(rows, "length"),
        **{path: [size(row[f"{path}_peak_bytes"]) for row in rows] for path in paths},
        "stored blocks": [size(row["stored_bytes"]) for row in rows],
        "relay/copy": column(rows, "relay_over_copy", ".3f"),
    }
    title = "Peak memory of a request"
    show(bench, engine, rows, settings, title, cells, x="length", unit="peak_bytes")
