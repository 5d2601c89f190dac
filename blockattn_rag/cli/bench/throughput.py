"""Tokens per second of requests at once, and of ingestion."""

from __future__ import annotations

from typing import Annotated

import typer

from blockattn_rag.cli.bench.options import (
    BatchSizes,
    Bench,
    BlockSizes,
    NewTokens,
    Repeats,
    measurement,
    numbers,
)
from blockattn_rag.cli.bench.report import column, open_engine, show
from blockattn_rag.cli.output import progress, size, working


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
    with working(bench.as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_shared

        engine = open_engine(bench, max(systems) + context_tokens + 16 + new_tokens)
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
    with working(bench.as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_ingest

        engine = open_engine(bench, 2 * max(counts))
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
