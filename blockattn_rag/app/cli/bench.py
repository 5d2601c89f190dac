"""``blockattn-rag bench``: times, throughput and memory of block mode and full prefill."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blockattn_rag.app.cli.options import JsonOption, PlotOption, check_plot
from blockattn_rag.app.cli.output import duration, emit, size, table, working
from blockattn_rag.app.cli.progress import progress
from blockattn_rag.app.rag.names import existing_model, loading

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.lab.efficiency.timing import OnProgress

_QUESTION_TOKENS, _NEW_TOKENS, _CONTEXT_TOKENS = 50, 32, 128
Measured = Literal["ttft", "decode", "batch", "shared", "ingest", "memory"]
Sizes = Mapping[str, Sequence[int]]
Row = Mapping[str, Any]
Rows = list[dict[str, Any]]
Cells = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class _Benchmark:
    """Definition of a benchmark.

    Args:
        title: Title of the table.
        defaults: Size options of the benchmark, with their defaults. An option whose default has
            one number accepts only one number.
        run: Function that measures and returns rows. Its arguments are the engine, the sizes, and
            keyword arguments of the measurement.
        columns: Function that makes the columns of the table from the rows.
        x: Field on the x-axis of the plot.
        series: Field whose values get separate lines in the plot.
        unit: Unit of the measured fields, which are named ``<path>_<unit>``.
    """

    title: str
    defaults: Sizes
    run: Callable[..., Rows]
    columns: Callable[[Sequence[Row]], Cells]
    x: str
    series: str | None = None
    unit: str = "s"


def bench(
    measured: Annotated[
        Measured,
        typer.Argument(
            metavar="WHAT",
            help="ttft (time to first token), decode (time per token), batch (time to first tokens "
            "of a batch), shared (tokens per second with a shared system prompt), ingest (tokens "
            "per second of encoding) or memory (peak memory of a request).",
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
        str | None,
        typer.Option(
            help="Context lengths in tokens, comma-separated. For shared: lengths of the system "
            "prompt."
        ),
    ] = None,
    block_tokens: Annotated[
        str | None, typer.Option(help="Tokens per block. decode and ingest accept a list.")
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="Batch sizes, comma-separated. Only for the benchmarks batch and shared."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; medians are reported.")] = 3,
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: float32, bfloat16 or float16.")
    ] = "float32",
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare block mode with full prefill on this machine."""
    benchmark = _BENCHMARKS[measured]
    given = {"lengths": lengths, "block_tokens": block_tokens, "batch_sizes": batch_sizes}
    sizes = _sizes(measured, benchmark.defaults, given)
    check_plot(plot)
    options = {} if measured == "memory" else {"repeats": repeats}
    # The lengths exclude the answer and, in the shared benchmark, the context of each request.
    longest = max(map(max, sizes.values())) + _CONTEXT_TOKENS + _QUESTION_TOKENS + _NEW_TOKENS
    with _engine(as_json, model, dtype, longest) as (engine, tick):
        rows = benchmark.run(engine, sizes, **options, on_progress=tick)
    _show(as_json, benchmark, model, engine, rows, options, plot)


def _sizes(measured: Measured, defaults: Sizes, given: Mapping[str, str | None]) -> Sizes:
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
    as_json: bool, model: str, dtype: str, tokens: int
) -> Iterator[tuple[BlockAttentionEngine, OnProgress]]:
    """Create the engine to measure, for contexts of ``tokens`` tokens, and a progress bar."""
    with working(as_json), progress("measuring") as tick:
        from blockattn_rag.engine.engine import BlockAttentionEngine
        from blockattn_rag.lab.efficiency.shapes import SHAPES, counting_tokenizer, random_llama
        from blockattn_rag.model.loading import load_model
        from blockattn_rag.store.memory import MemoryStore

        # Hides the warning that the model, which has random weights, is not block-fine-tuned.
        logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
        if model in SHAPES:
            loaded = random_llama(model, max_tokens=tokens + 16, dtype=dtype)
        else:
            with loading(model):
                loaded = load_model(model, dtype=dtype)
        # Without resident blocks, a repeated question is computed again.
        engine = BlockAttentionEngine.from_pretrained(
            loaded,
            tokenizer=counting_tokenizer(loaded.config.vocab_size),
            store=MemoryStore(1 << 40),
            resident_bytes=0,
        )
        yield engine, tick


def _show(
    as_json: bool,
    benchmark: _Benchmark,
    model: str,
    engine: BlockAttentionEngine,
    rows: Rows,
    options: Mapping[str, int],
    file: Path | None,
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
    if file:
        from blockattn_rag.lab.efficiency.plot import plot

        plot(rows, file, x=benchmark.x, unit=benchmark.unit, series=benchmark.series)
    title = f"{benchmark.title}, {model}, {data['dtype']} on {data['device']}"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    where = f"{found['accelerator'] or found['processor']}, {found['threads']} threads, {versions}."
    note = "Medians, with the range below. " if benchmark.unit == "s" else ""
    cells = benchmark.columns(rows)
    emit(as_json, data, table(title, list(cells), zip(*cells.values(), strict=True), left=()),
         note + where)  # fmt: skip


def _ttft(engine: Any, sizes: Sizes, **options: Any) -> Rows:
    from blockattn_rag.lab.efficiency import measure_ttft

    options |= {"block_tokens": sizes["block_tokens"][0], "question_tokens": _QUESTION_TOKENS}
    return measure_ttft(engine, sizes["lengths"], **options)


def _ttft_columns(rows: Sequence[Row]) -> Cells:
    reusing = _paths(rows, "copy", "relay")
    return {
        "context": _column(rows, "length", ","),
        **_spreads(rows, ["full", *reusing, "floor"]),
        **{f"full/{path}": _column(rows, f"full_over_{path}", ".1f") for path in reusing},
        "FLOPs ratio": _column(rows, "flops_ratio", ".0f"),
    }


def _decode(engine: Any, sizes: Sizes, **options: Any) -> Rows:
    from blockattn_rag.lab.efficiency import measure_decode

    options |= {"block_tokens": sizes["block_tokens"], "new_tokens": _NEW_TOKENS}
    return measure_decode(engine, sizes["lengths"], **options)


def _decode_columns(rows: Sequence[Row]) -> Cells:
    return {
        "context": _column(rows, "length", ","),
        "block": _column(rows, "block_tokens", ","),
        **_spreads(rows, _paths(rows, "full", "copy", "relay")),
        "relay/copy": _column(rows, "relay_over_copy", ".2f"),
    }


def _batch(engine: Any, sizes: Sizes, **options: Any) -> Rows:
    from blockattn_rag.lab.efficiency import measure_batch

    options |= {"length": sizes["lengths"][0], "block_tokens": sizes["block_tokens"][0]}
    return measure_batch(engine, sizes["batch_sizes"], **options)


def _batch_columns(rows: Sequence[Row]) -> Cells:
    reusing = _paths(rows, "copy", "relay")
    ratios = {path: _column(rows, f"full_over_{path}", ".1f") for path in reusing}
    return {
        "requests": _column(rows, "batch", ","),
        **_spreads(rows, ["full", *reusing]),
        **{f"full/{path}": ratios[path] for path in reusing},
    }


def _shared(engine: Any, sizes: Sizes, **options: Any) -> Rows:
    from blockattn_rag.lab.efficiency import measure_shared

    options |= {"context_tokens": _CONTEXT_TOKENS, "new_tokens": _NEW_TOKENS}
    return measure_shared(engine, sizes["batch_sizes"], system_tokens=sizes["lengths"], **options)


def _shared_columns(rows: Sequence[Row]) -> Cells:
    return {
        "system": _column(rows, "system_tokens", ","),
        "requests": _column(rows, "batch", ","),
        "unshared": _column(rows, "unshared_tokens_per_s", ".1f"),
        "shared": _column(rows, "shared_tokens_per_s", ".1f"),
        "gain": _column(rows, "gain", ".2f"),
        "decode gain": _column(rows, "decode_gain", ".2f"),
        "equation 10": _column(rows, "bytes_ratio", ".1f"),
    }


def _ingest(engine: Any, sizes: Sizes, **options: Any) -> Rows:
    from blockattn_rag.lab.efficiency import measure_ingest

    return measure_ingest(engine.model, sizes["block_tokens"], **options)


def _ingest_columns(rows: Sequence[Row]) -> Cells:
    return {
        "block": _column(rows, "block_tokens", ","),
        "encoding": _column(rows, "encode_tokens_per_s", ".0f"),
        "plain forward": _column(rows, "plain_tokens_per_s", ".0f"),
        "encoding/plain": _column(rows, "encode_over_plain", ".2f"),
        "stored per token": [size(row["bytes_per_token"]) for row in rows],
    }


def _memory(engine: Any, sizes: Sizes, **options: Any) -> Rows:
    from blockattn_rag.lab.efficiency import measure_memory

    options |= {"block_tokens": sizes["block_tokens"][0], "question_tokens": _QUESTION_TOKENS}
    return measure_memory(engine, sizes["lengths"], **options)


def _memory_columns(rows: Sequence[Row]) -> Cells:
    paths = _paths(rows, "full", "copy", "relay", unit="peak_bytes")
    return {
        "context": _column(rows, "length", ","),
        **{path: [size(row[f"{path}_peak_bytes"]) for row in rows] for path in paths},
        "stored blocks": [size(row["stored_bytes"]) for row in rows],
        "relay/copy": _column(rows, "relay_over_copy", ".3f"),
    }


_BENCHMARKS: dict[str, _Benchmark] = {
    "ttft": _Benchmark(
        "Time to first token",
        {"lengths": [512, 4096], "block_tokens": [512]},
        _ttft,
        _ttft_columns,
        "length",
    ),
    "decode": _Benchmark(
        "Time per token",
        {"lengths": [4096, 8192], "block_tokens": [128, 512]},
        _decode,
        _decode_columns,
        "length",
        "block_tokens",
    ),
    "batch": _Benchmark(
        "Time to first tokens",
        {"lengths": [8192], "block_tokens": [512], "batch_sizes": [1, 2, 4, 8]},
        _batch,
        _batch_columns,
        "batch",
    ),
    "shared": _Benchmark(
        "Tokens per second",
        {"lengths": [512, 1024, 2048], "batch_sizes": [1, 8, 32]},
        _shared,
        _shared_columns,
        "batch",
        "system_tokens",
        "tokens_per_s",
    ),
    "ingest": _Benchmark(
        "Tokens per second",
        {"block_tokens": [64, 128, 512]},
        _ingest,
        _ingest_columns,
        "block_tokens",
        unit="tokens_per_s",
    ),
    "memory": _Benchmark(
        "Peak memory of a request",
        {"lengths": [2048, 8192], "block_tokens": [512]},
        _memory,
        _memory_columns,
        "length",
        unit="peak_bytes",
    ),
}


def columns(measured: str, rows: Sequence[Row]) -> Cells:
    """Format the table of a benchmark: lists of cells by column name.

    Times are medians, with the range on a second line.
    """
    return _BENCHMARKS[measured].columns(rows)


def _paths(rows: Sequence[Row], *paths: str, unit: str = "s") -> list[str]:
    """The paths that were measured."""
    return [path for path in paths if f"{path}_{unit}" in rows[0]]


def _column(rows: Sequence[Row], name: str, form: str = "") -> list[str]:
    """Format a field of every row. ``nan``: the row has no such field."""
    return [format(row.get(name, float("nan")), form) for row in rows]


def _spreads(rows: Sequence[Row], paths: Sequence[str]) -> dict[str, list[str]]:
    return {path.replace("_", " "): [spread(row, path) for row in rows] for path in paths}


def spread(row: Row, path: str) -> str:
    """Format the median, and the range on a second line: ``101 ms``, ``93-177 ms``."""
    middle, low, high = (duration(row[f"{path}{end}_s"]) for end in ("", "_min", "_max"))
    number, _, unit = low.partition(" ")
    return f"{middle}\n{number if high.endswith(f' {unit}') else low}-{high}"
