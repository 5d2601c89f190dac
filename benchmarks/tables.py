"""Write the tables of docs/benchmarks.md and README from benchmarks/results/*.json.

    python benchmarks/tables.py

Each JSON file gets a Markdown file next to it, which the documentation includes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockattn_rag.app.cli.output import duration, size

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]
Columns = Sequence[tuple[str, Callable[[Row], str]]]


def seconds(name: str) -> Callable[[Row], str]:
    return lambda row: duration(row.get(f"{name}_s"))


def number(name: str, digits: int = 1) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:.{digits}f}"


def count(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:,}"


def peak(name: str) -> Callable[[Row], str]:
    return lambda row: size(row[f"{name}_peak_bytes"])


TABLES: Mapping[str, Columns] = {
    "ttft": (
        ("context", count("length")),
        ("full", seconds("full")),
        ("copy", seconds("copy")),
        ("relay", seconds("relay")),
        ("floor", seconds("floor")),
        ("full / relay", number("full_over_relay")),
        ("relay / copy", lambda row: f"{row['relay_s'] / row['copy_s']:.2f}"),
        ("FLOPs", number("flops_ratio", 0)),
    ),
    "decode": (
        ("context", count("length")),
        ("block", count("block_tokens")),
        ("full", seconds("full")),
        ("copy", seconds("copy")),
        ("relay", seconds("relay")),
        ("relay / copy", number("relay_over_copy", 2)),
    ),
    "shared": (
        ("system", count("system_tokens")),
        ("requests", count("batch")),
        ("unshared", number("unshared_tokens_per_s")),
        ("shared", number("shared_tokens_per_s")),
        ("gain", number("gain", 2)),
        ("decoding", number("decode_gain", 2)),
        ("equation 10", number("bytes_ratio")),
    ),
    "memory": (
        ("context", count("length")),
        ("block", count("block_tokens")),
        ("full", peak("full")),
        ("copy", peak("copy")),
        ("relay", peak("relay")),
        ("stored blocks", lambda row: size(row["stored_bytes"])),
        ("relay / copy", number("relay_over_copy", 3)),
    ),
    "ingest": (
        ("block", count("block_tokens")),
        ("encoding", number("encode_tokens_per_s", 0)),
        ("plain forward", number("plain_tokens_per_s", 0)),
        ("encoding / plain", number("encode_over_plain", 2)),
    ),
    "packing": (
        ("layer", lambda row: f"{row['in']:,} to {row['out']:,}"),
        ("rows", count("rows")),
        ("plain", seconds("plain")),
        ("packed", seconds("packed")),
        ("plain / packed", number("gain", 2)),
    ),
    "batch": (
        ("requests", count("batch")),
        ("full", seconds("full")),
        ("copy", seconds("copy")),
        ("relay", seconds("relay")),
        ("full / relay", number("full_over_relay")),
    ),
}


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *rows)]
    return "\n".join((lines[0], "|" + "---|" * len(head), *lines[1:])) + "\n"


def table(data: Mapping[str, Any], columns: Columns) -> str:
    """Rows as a Markdown table, and a line about the machine.

    A column shows a field of its row, or of the whole result, such as the tokens of a block.
    """
    rows = [[show({**data, **row}) for _, show in columns] for row in data["rows"]]
    lines = markdown([head for head, _ in columns], rows)
    machine = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = f"{machine['accelerator'] or machine['processor']}, {machine['threads']} threads"
    what = f"{data['model']} shape, {data['dtype']} on {data['device']}"
    how = "Counted." if "relay_peak_bytes" in data["rows"][0] else "Medians."
    return f"{lines}\n*{what}; {where}; {versions}. {how}*\n"


def main() -> int:
    for file in sorted(RESULTS.glob("*.json")):
        if columns := TABLES.get(file.stem.split("-")[0]):
            data = json.loads(file.read_text(encoding="utf-8"))
            file.with_suffix(".md").write_text(table(data, columns), encoding="utf-8")
            print(file.with_suffix(".md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
