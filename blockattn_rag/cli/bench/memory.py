"""Bytes of one more request."""

from __future__ import annotations

from blockattn_rag.cli.bench.options import (
    BlockTokens,
    Device,
    Dtype,
    Lengths,
    Model,
    Output,
    Plot,
    QuestionTokens,
    Shape,
    numbers,
)
from blockattn_rag.cli.bench.report import open_engine, report, show
from blockattn_rag.cli.output import JsonOption, progress, size, working


def memory(
    shape: Shape = "135m",
    model: Model = None,
    lengths: Lengths = "2048,8192",
    dtype: Dtype = "float32",
    device: Device = "auto",
    block_tokens: BlockTokens = 512,
    question_tokens: QuestionTokens = 50,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Peak memory of one more request, beside weights and stored blocks."""
    counts = numbers(lengths, "--lengths")
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_memory

        engine = open_engine(shape, model, dtype, device, max(counts) + question_tokens)
        sizes = {"block_tokens": block_tokens, "question_tokens": question_tokens}
        rows = measure_memory(engine, counts, **sizes, on_progress=tick)
    data = report(engine, model or shape, rows, **sizes)
    paths = [path for path in ("full", "copy", "relay") if f"{path}_peak_bytes" in rows[0]]
    cells = [
        (
            row["length"],
            *(size(row[f"{path}_peak_bytes"]) for path in paths),
            size(row["stored_bytes"]),
            f"{row.get('relay_over_copy', float('nan')):.3f}",
        )
        for row in rows
    ]
    columns = ("context", *paths, "stored blocks", "relay/copy")
    show(
        "Peak memory of a request", data, columns, cells, as_json, output, plot,
        x="length", unit="peak_bytes",
    )  # fmt: skip
