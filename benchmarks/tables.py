"""Write the tables in docs/benchmarks.md and the README from benchmarks/results/*.json.

    python benchmarks/tables.py

For each JSON file, a Markdown file is written next to it, which the documentation includes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import efficiency

from blockattn_rag.app.cli.output import duration

RESULTS = Path(__file__).parent / "results"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *rows)]
    return "\n".join((lines[0], "|" + "---|" * len(head), *lines[1:])) + "\n"


def cells(name: Any, data: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    """Return the columns of a result's table. All times are medians."""
    rows = data["rows"]
    if name == "packing":
        return {
            "layer": [f"{row['in']:,} to {row['out']:,}" for row in rows],
            "rows": [str(row["rows"]) for row in rows],
            "plain": [duration(row["plain_s"]) for row in rows],
            "packed": [duration(row["packed_s"]) for row in rows],
            "plain / packed": [f"{row['gain']:.2f}" for row in rows],
        }
    return efficiency.columns(name, rows)


def table(name: str, data: Mapping[str, Any]) -> str:
    """Format a result as a Markdown table, followed by a line about the machine."""
    found = cells(name, data)
    lines = markdown(list(found), zip(*found.values(), strict=True))
    machine = data["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    threads = machine["threads"]
    where = (
        f"{machine['accelerator'] or machine['processor']}, {threads} thread{'s'[: threads - 1]}"
    )
    kind = data.get("kind", "plain")
    layers = "" if kind == "plain" else f" with {data['layers']} {kind} layers"
    what = f"{data['model']} shape{layers}, {data['dtype']} on {data['device']}"
    how = "Counted." if name == "memory" else "Medians."
    return f"{lines}\n*{what}; {where}; {versions}. {how}*\n"


def main() -> int:
    for file in sorted(RESULTS.glob("*.json")):
        if (name := file.stem.split("-")[0]) in (*get_args(efficiency.Measured), "packing"):
            data = json.loads(file.read_text(encoding="utf-8"))
            file.with_suffix(".md").write_text(table(name, data), encoding="utf-8")
            print(file.with_suffix(".md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
