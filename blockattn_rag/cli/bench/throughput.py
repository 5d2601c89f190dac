"""Tokens per second of requests at once, and of ingestion."""

from __future__ import annotations

from typing import Annotated

import typer

from blockattn_rag.cli.bench.options import (
    BatchSizes,
    BlockSizes,
    Device,
    Dtype,
    Model,
    NewTokens,
    Output,
    Plot,
    Repeats,
    Shape,
    numbers,
)
from blockattn_rag.cli.bench.report import open_engine, report, show
from blockattn_rag.cli.output import JsonOption, progress, size, working


def shared(
    shape: Shape = "135m",
    model: Model = None,
    batch_sizes: BatchSizes = "1,8,32",
    system_tokens: Annotated[
        str, typer.Option(help="Tokens of the shared system prompt, with commas.")
    ] = "512,1024,2048",
    context_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a request's own.")] = 128,
    new_tokens: NewTokens = 32,
    dtype: Dtype = "float32",
    device: Device = "auto",
    repeats: Repeats = 3,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second of requests that share a system prompt, with and without sharing it."""
    counts, systems = (
        numbers(batch_sizes, "--batch-sizes"),
        numbers(system_tokens, "--system-tokens"),
    )
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_shared

        window = max(systems) + context_tokens + 16 + new_tokens
        engine = open_engine(shape, model, dtype, device, window)
        rows = measure_shared(
            engine,
            counts,
            system_tokens=systems,
            context_tokens=context_tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            on_progress=tick,
        )
    data = report(
        engine, model or shape, rows,
        repeats=repeats, context_tokens=context_tokens, new_tokens=new_tokens,
    )  # fmt: skip
    cells = [
        (
            row["system_tokens"],
            row["batch"],
            f"{row['unshared_tokens_per_s']:.1f}",
            f"{row['shared_tokens_per_s']:.1f}",
            f"{row['gain']:.2f}",
            f"{row['decode_gain']:.2f}",
            f"{row['bytes_ratio']:.1f}",
        )
        for row in rows
    ]
    columns = ("system", "requests", "unshared", "shared", "gain", "decode gain", "equation 10")
    show(
        "Tokens per second", data, columns, cells, as_json, output, plot,
        x="batch", unit="tokens_per_s", series="system_tokens",
    )  # fmt: skip


def ingest(
    shape: Shape = "135m",
    model: Model = None,
    block_tokens: BlockSizes = "64,128,512",
    total_tokens: Annotated[int, typer.Option(min=1, help="Tokens encoded in one run.")] = 8192,
    dtype: Dtype = "float32",
    device: Device = "auto",
    repeats: Repeats = 3,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second of encoding blocks, beside a plain batched forward."""
    counts = numbers(block_tokens, "--block-tokens")
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_ingest

        engine = open_engine(shape, model, dtype, device, 2 * max(counts))
        rows = measure_ingest(
            engine.model, counts, total_tokens=total_tokens, repeats=repeats, on_progress=tick
        )
    data = report(engine, model or shape, rows, repeats=repeats, total_tokens=total_tokens)
    cells = [
        (
            row["block_tokens"],
            f"{row['encode_tokens_per_s']:.0f}",
            f"{row['plain_tokens_per_s']:.0f}",
            f"{row['encode_over_plain']:.2f}",
            size(row["bytes_per_token"]),
        )
        for row in rows
    ]
    columns = ("block", "encoding", "plain forward", "encoding/plain", "stored per token")
    show(
        "Tokens per second", data, columns, cells, as_json, output, plot,
        x="block_tokens", unit="tokens_per_s",
    )  # fmt: skip
