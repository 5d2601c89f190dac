"""The engine that is measured, and the report of what came out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from blockattn_rag.app.cli.bench.options import Bench
from blockattn_rag.app.cli.figures import duration
from blockattn_rag.app.cli.output import emit, progress, table, working
from blockattn_rag.app.rag.model_names import loading

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.lab.efficiency.timing import OnProgress

Row = Mapping[str, Any]


@contextmanager
def measuring(bench: Bench, tokens: int) -> Iterator[tuple[BlockAttentionEngine, OnProgress]]:
    """The engine that ``bench`` names, whose tokens are counted words; and, while this is open, a
    bar of progress. A random shape takes contexts of ``tokens``, the answer included."""
    with working(bench.as_json), progress("measuring") as tick:
        from blockattn_rag.engine.engine import BlockAttentionEngine
        from blockattn_rag.lab.efficiency.shapes import counting_tokenizer, random_llama
        from blockattn_rag.model.loading import load_model
        from blockattn_rag.store.memory import MemoryStore

        # Random weights: that they are not block-fine-tuned goes without saying.
        logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
        where: dict[str, Any] = {"device": bench.device, "dtype": bench.dtype}
        if bench.model:
            with loading(bench.model):
                loaded = load_model(bench.model, **where)
        else:  # 16 more, because a model may reserve some
            loaded = random_llama(bench.shape, max_tokens=tokens + 16, **where)
        tokenizer, store = counting_tokenizer(loaded.config.vocab_size), MemoryStore(1 << 40)
        # The same question comes again and again, and is to be computed each time.
        engine = BlockAttentionEngine.from_pretrained(
            loaded, tokenizer=tokenizer, store=store, resident_bytes=0
        )
        yield engine, tick


def show(
    bench: Bench,
    engine: BlockAttentionEngine,
    rows: list[dict[str, Any]],
    settings: Mapping[str, int],
    title: str,
    cells: Mapping[str, Sequence[Any]],
    *,
    x: str,
    unit: str = "s",
    series: str | None = None,
) -> None:
    """Print the figures, and write and draw them where the options say so.

    Args:
        rows: the figures.
        settings: what else was set; part of the JSON object.
        title, cells: of the table; its columns, name to cells.
        x, unit, series: what the plot shows; see ``plot``.
    """
    from blockattn_rag.lab.efficiency import machine

    found = machine(engine.model.device)
    data = {
        "model": bench.model or bench.shape,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.model.device),
        **settings,
        "rows": rows,
        "machine": found,
    }
    if bench.output:
        bench.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if bench.plot:
        from blockattn_rag.lab.efficiency.plot import plot

        plot(rows, bench.plot, x=x, unit=unit, series=series)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    title = f"{title}, {data['model']}, {data['dtype']} on {data['device']}"
    where = f"{found['accelerator'] or found['processor']}, {found['threads']} threads"
    note = "Medians of the repeats, below them fastest and slowest." if unit == "s" else ""
    shown = table(title, list(cells), zip(*cells.values(), strict=True), left=())
    emit(bench.as_json, data, shown, f"{note} {where}, {versions}.".strip())


def measured(rows: Sequence[Row], *paths: str, unit: str = "s") -> list[str]:
    """Those of the paths that the rows have figures of."""
    return [path for path in paths if f"{path}_{unit}" in rows[0]]


def column(rows: Sequence[Row], name: str, form: str = "") -> list[str]:
    """A figure of every row as Python's format says; ``nan`` where a row has none."""
    return [format(row.get(name, float("nan")), form) for row in rows]


def spreads(rows: Sequence[Row], paths: Sequence[str]) -> dict[str, list[str]]:
    """For each path, a column of seconds; see ``spread``."""
    return {path.replace("_", " "): [spread(row, path) for row in rows] for path in paths}


def spread(row: Row, path: str) -> str:
    """The median, and in a second line the fastest and the slowest: ``101 ms``, ``93-177 ms``."""
    middle, low, high = (duration(row[f"{path}{end}_s"]) for end in ("", "_min", "_max"))
    number, _, unit = low.partition(" ")
    return f"{middle}\n{number if high.endswith(f' {unit}') else low}-{high}"
