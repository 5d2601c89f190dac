"""``blockattn-rag bench``: time to first token, batches, shared prompts, decoding, memory."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockattn_rag.cli.names import existing_model
from blockattn_rag.cli.output import JsonOption, duration, emit, progress, size, table, working

if TYPE_CHECKING:
    from blockattn_rag.engine import BlockAttentionEngine

app = typer.Typer(no_args_is_help=True, help="Measure times and memory on this machine.")

Shape = Annotated[str, typer.Option(help="Llama shape with random weights: tiny, 135m, 1b or 8b.")]
Model = Annotated[
    str | None,
    typer.Option(help="Measure this model instead of a shape.", callback=existing_model),
]
Lengths = Annotated[str, typer.Option(help="Context lengths in tokens, with commas between.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")]
BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens of a block.")]
QuestionTokens = Annotated[int, typer.Option(min=1, help="Tokens of the question.")]


def _writable(file: Path | None) -> Path | None:
    """Seen before anything is measured, not after."""
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"no such folder: {file.absolute().parent}")
    return file


def _drawable(file: Path | None) -> Path | None:
    if file is not None and file.suffix not in (".svg", ".png", ".pdf"):
        raise typer.BadParameter(f"expected a name that ends in .svg, .png or .pdf, found {file}")
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("plots need matplotlib: pip install 'blockattn-rag[train]'")
    return _writable(file)


Output = Annotated[
    Path | None, typer.Option(help="Write the JSON object to this file, too.", callback=_writable)
]
Plot = Annotated[
    Path | None,
    typer.Option(help="Draw the rows to this file (svg, png, pdf).", callback=_drawable),
]


@app.callback()
def _bench() -> None:
    """Measure times and memory on this machine."""


@app.command("ttft")
def ttft(
    shape: Shape = "135m",
    model: Model = None,
    lengths: Lengths = "512,4096",
    dtype: Dtype = "float32",
    device: Device = "auto",
    repeats: Repeats = 3,
    block_tokens: BlockTokens = 512,
    question_tokens: QuestionTokens = 50,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Time to first token: full prefill, blocks reused by copy and relay, the question alone."""
    counts = _numbers(lengths, "--lengths")
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_ttft

        engine = _engine(shape, model, dtype, device, max(counts) + question_tokens)
        sizes = {"block_tokens": block_tokens, "question_tokens": question_tokens}
        rows = measure_ttft(engine, counts, **sizes, repeats=repeats, on_progress=tick)
    data = _data(engine, model or shape, rows, repeats=repeats, **sizes)
    reusing = [path for path in ("copy", "relay") if f"{path}_s" in rows[0]]
    paths = ["full", *reusing, "floor"]
    cells = [
        (
            row["length"],
            *(_spread(row, path) for path in paths),
            *(f"{row[f'full_over_{path}']:.1f}" for path in reusing),
            f"{row['flops_ratio']:.0f}",
        )
        for row in rows
    ]
    columns = ("context", *paths, *(f"full/{path}" for path in reusing), "FLOPs ratio")
    _show("Time to first token", data, columns, cells, as_json, output, plot, x="length")


@app.command("decode")
def decode(
    shape: Shape = "135m",
    model: Model = None,
    lengths: Lengths = "4096,8192",
    block_tokens: Annotated[
        str, typer.Option(help="Tokens of a block; several sizes with commas between.")
    ] = "128,512",
    dtype: Dtype = "float32",
    device: Device = "auto",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 32,
    repeats: Repeats = 3,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Seconds per token after the first: full, copy and relay, by context and block size."""
    counts, blocks = _numbers(lengths, "--lengths"), _numbers(block_tokens, "--block-tokens")
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_decode

        engine = _engine(shape, model, dtype, device, max(counts) + 50 + new_tokens)
        rows = measure_decode(
            engine,
            counts,
            block_tokens=blocks,
            new_tokens=new_tokens,
            repeats=repeats,
            on_progress=tick,
        )
    data = _data(engine, model or shape, rows, repeats=repeats, new_tokens=new_tokens)
    paths = [path for path in ("full", "copy", "relay") if f"{path}_s" in rows[0]]
    cells = [
        (
            row["length"],
            row["block_tokens"],
            *(_spread(row, path) for path in paths),
            f"{row.get('relay_over_copy', float('nan')):.2f}",
        )
        for row in rows
    ]
    columns = ("context", "block", *paths, "relay/copy")
    _show(
        "Time per token", data, columns, cells, as_json, output, plot,
        x="length", series="block_tokens",
    )  # fmt: skip


@app.command("batch")
def batch(
    shape: Shape = "135m",
    model: Model = None,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,2,4,8",
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
    counts = _numbers(batch_sizes, "--batch-sizes")
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_batch

        engine = _engine(shape, model, dtype, device, length + question_tokens)
        sizes = {
            "length": length,
            "block_tokens": block_tokens,
            "question_tokens": question_tokens,
        }
        rows = measure_batch(engine, counts, **sizes, repeats=repeats, on_progress=tick)
    data = _data(engine, model or shape, rows, repeats=repeats, **sizes)
    paths = [path for path in ("full", "copy", "relay") if f"{path}_s" in rows[0]]
    cells = [
        (
            row["batch"],
            *(_spread(row, path) for path in paths),
            *(f"{row[f'full_over_{path}']:.1f}" for path in paths[1:]),
        )
        for row in rows
    ]
    columns = ("requests", *paths, *(f"full/{path}" for path in paths[1:]))
    title = f"Time to first tokens at {length} tokens of context"
    _show(title, data, columns, cells, as_json, output, plot, x="batch")


@app.command("shared")
def shared(
    shape: Shape = "135m",
    model: Model = None,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,8,32",
    system_tokens: Annotated[
        str, typer.Option(help="Tokens of the shared system prompt, with commas.")
    ] = "512,1024,2048",
    context_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a request's own.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 32,
    dtype: Dtype = "float32",
    device: Device = "auto",
    repeats: Repeats = 3,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second of requests that share a system prompt, with and without sharing it."""
    counts, systems = (
        _numbers(batch_sizes, "--batch-sizes"),
        _numbers(system_tokens, "--system-tokens"),
    )
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_shared

        window = max(systems) + context_tokens + 16 + new_tokens
        engine = _engine(shape, model, dtype, device, window)
        rows = measure_shared(
            engine,
            counts,
            system_tokens=systems,
            context_tokens=context_tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            on_progress=tick,
        )
    data = _data(
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
    _show(
        "Tokens per second", data, columns, cells, as_json, output, plot,
        x="batch", unit="tokens_per_s", series="system_tokens",
    )  # fmt: skip


@app.command("ingest")
def ingest(
    shape: Shape = "135m",
    model: Model = None,
    block_tokens: Annotated[
        str, typer.Option(help="Mean tokens of a block; several sizes with commas between.")
    ] = "64,128,512",
    total_tokens: Annotated[int, typer.Option(min=1, help="Tokens encoded in one run.")] = 8192,
    dtype: Dtype = "float32",
    device: Device = "auto",
    repeats: Repeats = 3,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second of encoding blocks, beside a plain batched forward."""
    counts = _numbers(block_tokens, "--block-tokens")
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_ingest

        engine = _engine(shape, model, dtype, device, 2 * max(counts))
        rows = measure_ingest(
            engine.model, counts, total_tokens=total_tokens, repeats=repeats, on_progress=tick
        )
    data = _data(engine, model or shape, rows, repeats=repeats, total_tokens=total_tokens)
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
    _show(
        "Tokens per second", data, columns, cells, as_json, output, plot,
        x="block_tokens", unit="tokens_per_s",
    )  # fmt: skip


@app.command("memory")
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
    counts = _numbers(lengths, "--lengths")
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.evaluation.efficiency import measure_memory

        engine = _engine(shape, model, dtype, device, max(counts) + question_tokens)
        sizes = {"block_tokens": block_tokens, "question_tokens": question_tokens}
        rows = measure_memory(engine, counts, **sizes, on_progress=tick)
    data = _data(engine, model or shape, rows, **sizes)
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
    _show(
        "Peak memory of a request", data, columns, cells, as_json, output, plot,
        x="length", unit="peak_bytes",
    )  # fmt: skip


def _engine(
    shape: str, model: str | None, dtype: str, device: str, tokens: int
) -> BlockAttentionEngine:
    """An engine over a random shape or a real model, whose tokens are counted words."""
    from blockattn_rag.engine import BlockAttentionEngine
    from blockattn_rag.evaluation.efficiency.shapes import counting_tokenizer, random_llama
    from blockattn_rag.model.loading import load_model
    from blockattn_rag.store.memory import MemoryStore

    # Random weights: that they are not block-fine-tuned goes without saying.
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    # Room for the answer, and what a model may reserve.
    loaded = (
        load_model(model, device=device, dtype=dtype)
        if model
        else random_llama(shape, max_tokens=tokens + 16, device=device, dtype=dtype)
    )
    tokenizer = counting_tokenizer(loaded.config.vocab_size)
    store = MemoryStore(1 << 40)
    return BlockAttentionEngine.from_pretrained(loaded, tokenizer=tokenizer, store=store)


def _data(
    engine: BlockAttentionEngine, name: str, rows: list[dict[str, Any]], **settings: Any
) -> dict[str, Any]:
    """The JSON object: what was measured, how, on what, and the rows."""
    from blockattn_rag.evaluation.efficiency import machine

    return {
        "model": name,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.model.device),
        **settings,
        "rows": rows,
        "machine": machine(engine.model.device),
    }


def _show(
    title: str,
    data: dict[str, Any],
    columns: Sequence[str],
    cells: Sequence[Sequence[Any]],
    as_json: bool,
    output: Path | None,
    plot: Path | None,
    *,
    x: str,
    unit: str = "s",
    series: str | None = None,
) -> None:
    if output:
        output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if plot:
        from blockattn_rag.evaluation.efficiency.plot import plot as draw

        draw(data["rows"], plot, x=x, unit=unit, series=series)
    machine = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    title = f"{title}, {data['model']}, {data['dtype']} on {data['device']}"
    where = f"{machine['accelerator'] or machine['processor']}, {machine['threads']} threads"
    note = "Medians of the repeats (fastest - slowest)." if unit == "s" else ""
    emit(
        as_json, data, table(title, columns, cells, left=()), f"{note} {where}, {versions}.".strip()
    )


def _numbers(text: str, option: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected whole numbers with commas between, found {text!r}", param_hint=option
        ) from None
    if min(counts) < 1:
        raise typer.BadParameter("numbers must be at least 1", param_hint=option)
    return counts


def _spread(row: dict[str, Any], path: str) -> str:
    low, high = row[f"{path}_min_s"], row[f"{path}_max_s"]
    return f"{duration(row[f'{path}_s'])} ({duration(low)} - {duration(high)})"
