"""``blockattn-rag bench``: time to first token, batches, shared prompts, decoding, memory."""

from __future__ import annotations

import typer

from blockattn_rag.cli.bench.latency import batch, decode, ttft
from blockattn_rag.cli.bench.memory import memory
from blockattn_rag.cli.bench.throughput import ingest, shared

app = typer.Typer(no_args_is_help=True, help="Measure times and memory on this machine.")
for command in (ttft, decode, batch, shared, ingest, memory):
    app.command()(command)
