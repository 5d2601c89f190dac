"""Seconds to the first token, and per token after it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from blockattn_rag.cli.bench.options import (
    BatchSizes,
    BlockSizes,
    BlockTokens,
    CudaGraphs,
    Device,
    Dtype,
    Lengths,
    Model,
    NewTokens,
    Output,
    Plot,
    QuestionTokens,
    Repeats,
    Shape,
    numbers,
)
from blockattn_rag.cli.bench.report import open_engine, report, show, spread
from blockattn_rag.cli.output import JsonOption, progress, working


def ttft(
    shape: Shape = "135m",
    model: Model = None,
    lengths: Lengths = "512,4096",
    dtype: Dtype = "float32",
    device: Device = "auto",
    cuda_graphs: CudaGraphs = False,
    repeats: Repeats = 3,
    block_tokens: BlockTokens = 512,
    question_tokens: QuestionTokens = 50,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Time to first token: full prefill, blocks reused by copy and relay, and the floor.

    The floor is the question without any context: no reuse can be faster.
    """
    counts = numbers(lengths, "--lengths")
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_ttft

        tokens = max(counts) + question_tokens
        engine = open_engine(shape, model, dtype, device, tokens, cuda_graphs=cuda_graphs)
        sizes = {"block_tokens": block_tokens, "question_tokens": question_tokens}
        rows = measure_ttft(engine, counts, **sizes, repeats=repeats, on_progress=tick)
    data = report(engine, model or shape, rows, repeats=repeats, **sizes)
    reusing = [path for path in ("copy", "relay") if f"{path}_s" in rows[0]]
    paths = ["full", *reusing, "floor"]
    cells = [
        (
            row["length"],
            *(spread(row, path) for path in paths),
            *(f"{row[f'full_over_{path}']:.1f}" for path in reusing),
            f"{row['flops_ratio']:.0f}",
        )
        for row in rows
    ]
    columns = ("context", *paths, *(f"full/{path}" for path in reusing), "FLOPs ratio")
    show("Time to first token", data, columns, cells, as_json, output, plot, x="length")


def decode(
    shape: Shape = "135m",
    model: Model = None,
    lengths: Lengths = "4096,8192",
    block_tokens: BlockSizes = "128,512",
    dtype: Dtype = "float32",
    device: Device = "auto",
    cuda_graphs: CudaGraphs = False,
    new_tokens: NewTokens = 32,
    repeats: Repeats = 3,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Seconds per token after the first: full, copy and relay, by context and block size."""
    counts, blocks = numbers(lengths, "--lengths"), numbers(block_tokens, "--block-tokens")
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_decode

        tokens = max(counts) + 50 + new_tokens
        engine = open_engine(shape, model, dtype, device, tokens, cuda_graphs=cuda_graphs)
        rows = measure_decode(
            engine,
            counts,
            block_tokens=blocks,
            new_tokens=new_tokens,
            repeats=repeats,
            on_progress=tick,
        )
    data = report(engine, model or shape, rows, repeats=repeats, new_tokens=new_tokens)
    paths = [path for path in ("full", "copy", "relay") if f"{path}_s" in rows[0]]
    cells = [
        (
            row["length"],
            row["block_tokens"],
            *(spread(row, path) for path in paths),
            f"{row.get('relay_over_copy', float('nan')):.2f}",
        )
        for row in rows
    ]
    columns = ("context", "block", *paths, "relay/copy")
    show(
        "Time per token", data, columns, cells, as_json, output, plot,
        x="length", series="block_tokens",
    )  # fmt: skip


def batch(
    shape: Shape = "135m",
    model: Model = None,
    batch_sizes: BatchSizes = "1,2,4,8",
    length: Annotated[int, typer.Option(min=1, help="Context tokens of each request.")] = 8192,
    dtype: Dtype = "float32",
    device: Device = "auto",
    repeats: Repeats = 3,
    block_tokens: BlockTokens = 512,
    question_tokens: QuestionTokens = 50,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Time to the first tokens of a batch of unrelated requests, by batch size."""
    counts = numbers(batch_sizes, "--batch-sizes")
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_batch

        engine = open_engine(shape, model, dtype, device, length + question_tokens)
        sizes: dict[str, Any] = {
            "length": length,
            "block_tokens": block_tokens,
            "question_tokens": question_tokens,
        }
        rows = measure_batch(engine, counts, **sizes, repeats=repeats, on_progress=tick)
    data = report(engine, model or shape, rows, repeats=repeats, **sizes)
    places = ("full", "copy", "relay", "copy_from_host", "relay_from_host")
    paths = [path for path in places if f"{path}_s" in rows[0]]
    cells = [
        (
            row["batch"],
            *(spread(row, path) for path in paths),
            *(f"{row[f'full_over_{path}']:.1f}" for path in paths[1:]),
        )
        for row in rows
    ]
    names = [path.replace("_", " ") for path in paths]
    columns = ("requests", *names, *(f"full/{name}" for name in names[1:]))
    title = f"Time to first tokens at {length} tokens of context"
    show(title, data, columns, cells, as_json, output, plot, x="batch")
