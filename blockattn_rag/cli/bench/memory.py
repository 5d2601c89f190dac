"""Bytes of one more request."""

from __future__ import annotations

from blockattn_rag.cli.bench.options import (
    Bench,
    BlockTokens,
    Lengths,
    QuestionTokens,
    measurement,
    numbers,
)
from blockattn_rag.cli.bench.report import column, measured, open_engine, show
from blockattn_rag.cli.output import progress, size, working


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
    with working(bench.as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_memory

        engine = open_engine(bench, max(counts) + question_tokens)
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
