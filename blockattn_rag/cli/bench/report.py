"""The engine that is measured, and the report of what came out."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockattn_rag.cli.output import duration, emit, table
from blockattn_rag.rag.names import loading

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine


def open_engine(
    shape: str,
    model: str | None,
    dtype: str,
    device: str,
    tokens: int,
    *,
    cuda_graphs: bool = False,
) -> BlockAttentionEngine:
    """An engine over a random shape or a real model, whose tokens are counted words."""
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.evaluation.efficiency.shapes import counting_tokenizer, random_llama
    from blockattn_rag.model.loading import load_model
    from blockattn_rag.store.memory import MemoryStore

    # Random weights: that they are not block-fine-tuned goes without saying.
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    # Room for the answer, and what a model may reserve.
    if model:
        with loading(model):
            loaded = load_model(model, device=device, dtype=dtype)
    else:
        loaded = random_llama(shape, max_tokens=tokens + 16, device=device, dtype=dtype)
    tokenizer = counting_tokenizer(loaded.config.vocab_size)
    store = MemoryStore(1 << 40)
    return BlockAttentionEngine.from_pretrained(
        loaded, tokenizer=tokenizer, store=store, cuda_graphs=cuda_graphs
    )


def report(
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


def show(
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
    note = "Medians of the repeats, below them fastest and slowest." if unit == "s" else ""
    emit(
        as_json, data, table(title, columns, cells, left=()), f"{note} {where}, {versions}.".strip()
    )


def spread(row: dict[str, Any], path: str) -> str:
    """The median, and in a second line the fastest and the slowest: ``101 ms``, ``93-177 ms``."""
    middle, low, high = (duration(row[f"{path}{end}_s"]) for end in ("", "_min", "_max"))
    number, _, unit = low.partition(" ")
    return f"{middle}\n{number if high.endswith(f' {unit}') else low}-{high}"
