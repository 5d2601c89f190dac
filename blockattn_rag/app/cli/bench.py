"""``blockattn-rag bench``: times and memory of block mode and full prefill."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blockattn_rag.app.cli.output import duration, emit, size, table
from blockattn_rag.app.cli.progress import progress
from blockattn_rag.app.rag.names import existing_model

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.lab.efficiency.measure import OnProgress

_LONGEST_REST = 128
"""Maximum number of tokens of a question and an answer, which lengths exclude."""

Measured = Literal["ttft", "decode", "batch", "memory"]
Sizes = Mapping[str, Sequence[int]]
Row = Mapping[str, Any]
Rows = list[dict[str, Any]]

_TITLES: dict[Measured, str] = {
    "ttft": "Time to first token",
    "decode": "Time per token",
    "batch": "Time to first tokens",
    "memory": "Peak memory of a request",
}
_DEFAULTS: dict[Measured, Sizes] = {
    "ttft": {"lengths": [512, 4096], "block_tokens": [512]},
    "decode": {"lengths": [4096, 8192], "block_tokens": [128, 512]},
    "batch": {"lengths": [8192], "block_tokens": [512], "batch_sizes": [1, 2, 4, 8]},
    "memory": {"lengths": [2048, 8192], "block_tokens": [512]},
}
"""Size options of each benchmark. One whose default has one number accepts only one number."""


def bench(
    measured: Annotated[
        Measured,
        typer.Argument(
            metavar="WHAT",
            help="ttft (time to first token), decode (time per token), batch (time to first tokens "
            "of a batch) or memory (peak memory of a request).",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Model to measure, or a Llama shape with random weights: tiny, 135m, 1b, 8b.",
            callback=existing_model,
        ),
    ] = "135m",
    lengths: Annotated[
        str | None, typer.Option(help="Context lengths in tokens, comma-separated.")
    ] = None,
    block_tokens: Annotated[
        str | None, typer.Option(help="Tokens per block. decode accepts a list.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Batch sizes, comma-separated. Only for the benchmark batch.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; medians are reported.")] = 3,
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: float32, bfloat16 or float16.")
    ] = "float32",
) -> None:
    """Compare block mode with full prefill on this machine."""
    given = {"lengths": lengths, "block_tokens": block_tokens, "batch_sizes": batch_sizes}
    sizes = _sizes(measured, given)
    options = {} if measured == "memory" else {"repeats": repeats}
    longest = max(map(max, sizes.values())) + _LONGEST_REST
    with _engine(model, dtype, longest) as (engine, tick):
        rows = _measure(measured, engine, sizes, **options, on_progress=tick)
    _show(measured, model, engine, rows, options)


def _sizes(measured: Measured, given: Mapping[str, str | None]) -> Sizes:
    defaults = _DEFAULTS[measured]
    found = dict(defaults)
    for name, text in given.items():
        if text is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if name not in defaults:
            raise typer.BadParameter(f"{measured} does not support this option", param_hint=option)
        found[name] = _numbers(text, option)
        if len(defaults[name]) == 1 < len(found[name]):
            message = f"found {text!r}, but {measured} accepts only one number"
            raise typer.BadParameter(message, param_hint=option)
    return found


def _numbers(text: str, option: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        message = f"found {text!r}, expected whole numbers above 0, comma-separated"
        raise typer.BadParameter(message, param_hint=option)
    return found


@contextmanager
def _engine(
    model: str, dtype: str, tokens: int
) -> Iterator[tuple[BlockAttentionEngine, OnProgress]]:
    """Create the engine to measure, for contexts of ``tokens`` tokens, and a progress bar."""
    with progress("measuring") as tick:
        from blockattn_rag.engine.engine import BlockAttentionEngine
        from blockattn_rag.lab.efficiency.shapes import SHAPES, counting_tokenizer, random_llama
        from blockattn_rag.model.loading import load_model
        from blockattn_rag.store.memory import MemoryStore

        # Hides the warning that the model, which has random weights, is not block-fine-tuned.
        logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
        if model in SHAPES:
            loaded = random_llama(model, max_tokens=tokens, dtype=dtype)
        else:
            loaded = load_model(model, dtype=dtype)
        # Without resident blocks, a repeated question is computed again.
        engine = BlockAttentionEngine.from_pretrained(
            loaded,
            tokenizer=counting_tokenizer(loaded.config.vocab_size),
            store=MemoryStore(1 << 40),
            resident_bytes=0,
        )
        yield engine, tick


def _measure(
    measured: Measured, engine: BlockAttentionEngine, sizes: Sizes, **options: Any
) -> Rows:
    from blockattn_rag.lab import efficiency

    lengths, block_tokens = sizes["lengths"], sizes["block_tokens"]
    if measured == "decode":
        return efficiency.measure_decode(engine, lengths, block_tokens=block_tokens, **options)
    options["block_tokens"] = block_tokens[0]
    if measured == "batch":
        batches, length = sizes["batch_sizes"], lengths[0]
        return efficiency.measure_batch(engine, batches, length=length, **options)
    measure = efficiency.measure_ttft if measured == "ttft" else efficiency.measure_memory
    return measure(engine, lengths, **options)


def _show(
    measured: Measured,
    model: str,
    engine: BlockAttentionEngine,
    rows: Rows,
    options: Mapping[str, int],
) -> None:
    from blockattn_rag.lab.efficiency import machine

    found = machine(engine.model.device)
    data = {
        "model": model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.model.device),
        **options,
        "rows": rows,
        "machine": found,
    }
    title = f"{_TITLES[measured]}, {model}, {data['dtype']} on {data['device']}"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    where = f"{found['accelerator'] or found['processor']}, {found['threads']} threads, {versions}."
    note = "" if measured == "memory" else "Medians, with the range below. "
    cells = columns(measured, rows)
    emit(data, table(title, list(cells), zip(*cells.values(), strict=True), left=()),
         note + where)  # fmt: skip


def columns(measured: str, rows: Sequence[Row]) -> dict[str, list[str]]:
    """Format the table of a benchmark: lists of cells by column name.

    Times are medians, with the range on a second line.
    """
    sizes = {"context": "length", "block": "block_tokens", "requests": "batch"}
    if measured == "batch":
        del sizes["context"]
    ratios = {
        "full/copy": ("full_over_copy", ".1f"),
        "full/relay": ("full_over_relay", ".1f"),
        "relay/copy": ("relay_over_copy", ".3f" if measured == "memory" else ".2f"),
        "FLOPs ratio": ("flops_ratio", ".0f"),
    }
    found = {head: [f"{r[n]:,}" for r in rows] for head, n in sizes.items() if n in rows[0]}
    for path in ("full", "copy", "relay", "floor"):
        if f"{path}_s" in rows[0]:
            found[path] = [spread(row, path) for row in rows]
        elif f"{path}_peak_bytes" in rows[0]:
            found[path] = [size(row[f"{path}_peak_bytes"]) for row in rows]
    if measured == "memory":
        found["stored blocks"] = [size(row["stored_bytes"]) for row in rows]
    for head, (name, form) in ratios.items():
        if name in rows[0]:
            found[head] = [format(row[name], form) for row in rows]
    return found


def spread(row: Row, path: str) -> str:
    """Format the median, and the range on a second line: ``101 ms``, ``93-177 ms``."""
    middle, low, high = (duration(row[f"{path}{end}_s"]) for end in ("", "_min", "_max"))
    number, _, unit = low.partition(" ")
    return f"{middle}\n{number if high.endswith(f' {unit}') else low}-{high}"
