"""``blockattn-rag bench``: how long the first token takes."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer

from blockattn_rag.cli.names import existing_model
from blockattn_rag.cli.output import JsonOption, duration, emit, progress, table, working

app = typer.Typer(no_args_is_help=True, help="Measure times on this machine.")


@app.callback()
def _bench() -> None:
    """Measure times on this machine."""


@app.command("ttft")
def ttft(
    shape: Annotated[
        str, typer.Option(help="Llama shape with random weights: tiny, 135m, 1b or 8b.")
    ] = "135m",
    model: Annotated[
        str | None,
        typer.Option(help="Measure this model instead of a shape.", callback=existing_model),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Context lengths in tokens, with commas between.")
    ] = "512,4096",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")] = 3,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 512,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Time to first token: full prefill, blocks reused by copy and relay, the question alone."""
    counts = _lengths(lengths)
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.engine import BlockAttentionEngine
        from blockattn_rag.evaluation.efficiency import machine, measure_ttft
        from blockattn_rag.evaluation.shapes import counting_tokenizer, random_llama
        from blockattn_rag.model.loading import load_model
        from blockattn_rag.store.memory import MemoryStore

        # Random weights: that they are not block-fine-tuned goes without saying.
        logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
        # Room for the question, the answer, and what a model may reserve.
        window = max(counts) + question_tokens + 16
        loaded = (
            load_model(model, device=device, dtype=dtype)
            if model
            else random_llama(shape, max_tokens=window, device=device, dtype=dtype)
        )
        engine = BlockAttentionEngine.from_pretrained(
            loaded,
            tokenizer=counting_tokenizer(loaded.config.vocab_size),
            store=MemoryStore(1 << 40),
        )
        rows = measure_ttft(
            engine,
            counts,
            block_tokens=block_tokens,
            question_tokens=question_tokens,
            repeats=repeats,
            on_progress=tick,
        )
        data = {
            "model": model or f"random-llama-{shape}",
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": str(loaded.device),
            "block_tokens": block_tokens,
            "question_tokens": question_tokens,
            "repeats": repeats,
            "rows": rows,
            "machine": machine(),
        }
    emit(as_json, data, *_tables(data))


def _lengths(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected whole numbers with commas between, found {text!r}", param_hint="--lengths"
        ) from None
    if min(counts) < 1:
        raise typer.BadParameter("a context has at least 1 token", param_hint="--lengths")
    return counts


def _tables(data: dict[str, Any]) -> list[Any]:
    reusing = [path for path in ("copy", "relay") if f"{path}_s" in data["rows"][0]]
    paths = ["full", *reusing, "floor"]
    rows = [
        (
            row["length"],
            *(_spread(row, path) for path in paths),
            *(f"{row[f'full_over_{path}']:.1f}" for path in reusing),
            f"{row['flops_ratio']:.0f}",
        )
        for row in data["rows"]
    ]
    title = f"Time to first token, {data['model']}, {data['dtype']} on {data['device']}"
    columns = ("context", *paths, *(f"full/{path}" for path in reusing), "FLOPs ratio")
    return [table(title, columns, rows, left=()), "Median of the repeats (fastest - slowest)."]


def _spread(row: dict[str, Any], path: str) -> str:
    low, high = row[f"{path}_min_s"], row[f"{path}_max_s"]
    return f"{duration(row[f'{path}_s'])} ({duration(low)} - {duration(high)})"
