"""``blockattn-rag bench``: time to first token, batches, shared prompts, decoding, memory."""

from __future__ import annotations

import typer

from blockattn_rag.app.cli.bench.measurements import batch, decode, ingest, memory, shared, ttft

app = typer.Typer(no_args_is_help=True, help="Measure times and memory on this machine.")
for command in (ttft, decode, batch, shared, ingest, memory):
    app.command()(command)
