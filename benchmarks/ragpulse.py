"""Convert RAGPulse, a public log of a RAG service, to a log for ``benchmarks/replay.py``.

    git clone https://github.com/flashserve/RAGPulse
    python benchmarks/ragpulse.py RAGPulse ragpulse.jsonl
    python benchmarks/replay.py ragpulse.jsonl --model 8b --dtype bfloat16

The folder contains the requests in ``0_trace.jsonl``, and the lengths of their segments in
``1_sys_prompt.jsonl`` to ``5_web_search.jsonl``, optionally gzipped. Requests are sorted by time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from blockattn_rag.lab.json_lines import numbered_lines, parse_line

KINDS = {
    "sys_prompt": "system",
    "passages_ids": "passage",
    "history": "history",
    "web_search": "web",
    "user_input": "question",
}
"""Segment kinds in our format, by the name of the list in a request, in prompt order."""
LENGTHS = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")


def records(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, which may be gzipped."""
    plain, zipped = (folder / f"{name}.jsonl{ending}" for ending in ("", ".gz"))
    for _, line in numbered_lines(plain if plain.is_file() else zipped):
        record = parse_line(line)
        assert isinstance(record, dict), f"{name}: found {record!r}, expected an object"
        yield record


def converted(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests in the format of ``benchmarks/replay.py``, sorted by time."""
    lengths: dict[int, int] = {}
    for name in LENGTHS:
        for record in records(folder, name):
            # {"passage_id": 0, "token_length": 84}: ids are unique across all files.
            tokens = record.pop("token_length")
            (segment,) = record.values()
            if segment in lengths:
                raise ValueError(f"{name}: the id {segment} is a duplicate, expected unique ids")
            lengths[segment] = tokens
    for request in sorted(records(folder, "0_trace"), key=lambda one: float(one["timestamp"])):
        parts = request["hash_ids"]
        yield {
            "segments": [
                {"id": str(segment), "tokens": lengths[segment], "kind": kind}
                for name, kind in KINDS.items()
                for segment in parts[name]
            ]
        }


def main(
    folder: Annotated[Path, typer.Argument(help="Clone of the RAGPulse repository.")],
    output: Annotated[Path, typer.Argument(help="Log to write, .jsonl.")],
) -> None:
    """Convert the RAGPulse trace to a log for ``replay.py``."""
    with output.open("w", encoding="utf-8") as file:
        for request in converted(folder):
            file.write(json.dumps(request) + "\n")


if __name__ == "__main__":
    typer.run(main)
