"""Run common use cases of LangChain and LlamaIndex with this package's models and, if installed,
with the frameworks' own local models ("peers").

    python benchmarks/use_cases [--only NAME] [--output FILE.json]

A use case works if it completes and returns what the framework documents; the content of answers is
not evaluated. Each use case runs with ingested passages, the bundled model and a chat template that
supports tools. The reuse percentage is the share of its prompt tokens from stored blocks. The
script prints a table; ``--output`` also writes the results as JSON, with the table next to the
file. The peers require langchain-huggingface and llama-index-llms-huggingface.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).parents[1]))
from kits import model_folder, own_langchain, own_llama_index, peer_langchain, peer_llama_index
from measuring import machine
from outcomes import Outcome, Row, counts, summary, table, tried
from registry import Use, all_uses

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.pending import PendingRequest
from blockattn_rag.store import MemoryStore

FRAMEWORKS = ("langchain", "langchain-core", "langchain-classic", "langgraph", "llama-index-core")
PEERS = ("langchain-huggingface", "llama-index-llms-huggingface")


@contextmanager
def noted(engine: BlockAttentionEngine) -> Iterator[list[PendingRequest]]:
    """Record all requests to an engine within the context."""
    asked: list[PendingRequest] = []
    runner = engine._runner
    answer_batch = runner.answer_batch

    def note(batch: Sequence[PendingRequest]) -> None:
        asked.extend(batch)
        answer_batch(batch)

    runner.answer_batch = note  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        runner.answer_batch = answer_batch  # type: ignore[method-assign]


def tried_here(use: Use, kit: Any, engine: BlockAttentionEngine, *, trace: bool) -> Outcome:
    """Run a use case with a kit of this package's models, and measure reuse."""
    with noted(engine) as asked:
        outcome = tried(use, kit, trace=trace)
    if outcome.result != "works":
        return outcome
    stats = [request.answer.result().stats for request in asked]
    total = sum(one.prompt_tokens for one in stats)
    return Outcome("works", None, total, sum(one.reused_tokens for one in stats))


def rows_of(only: str, folder: Path, *, trace: bool) -> Iterator[Row]:
    """Run the use cases whose framework and name contain ``only``."""
    path = model_folder(folder)
    # Disable tails (`engine.tails`), because the use cases repeat the same question.
    store = MemoryStore(1 << 30)
    engine = BlockAttentionEngine.from_pretrained(path, store=store, resident_bytes=0)
    own = {"LangChain": own_langchain(engine), "LlamaIndex": own_llama_index(engine)}
    peers = {"LangChain": peer_langchain(path), "LlamaIndex": peer_llama_index(path)}
    for use in all_uses():
        if only in f"{use.framework} {use.name}":
            ours = tried_here(use, own[use.framework], engine, trace=trace)
            peer = tried(use, peers[use.framework], trace=trace)
            yield Row(use.framework, use.name, ours, peer)


def versions() -> dict[str, str]:
    """Return the versions of the frameworks and of the installed peers."""
    found = {}
    for name in (*FRAMEWORKS, *PEERS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def closing(rows: Sequence[Row], here: dict[str, Any]) -> str:
    """Return the text below the table: counts, machine and versions."""
    named = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    return f"{summary(rows)}\n\n*{here['processor']}, {here['threads']} threads; {named}.*"


def main(
    only: Annotated[str, typer.Option(help="Run use cases whose name contains this.")] = "",
    output: Annotated[Path | None, typer.Option(help="A .json file; .md goes next to it.")] = None,
    trace: Annotated[bool, typer.Option(help="Print tracebacks of failures.")] = False,
) -> None:
    """Run the use cases, and print a table."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(only, Path(folder) / "bundled-with-tools", trace=trace):
            head, mark, line = table([row]).splitlines()
            print(line if rows else f"{head}\n{mark}\n{line}", flush=True)
            rows.append(row)
    here = machine()
    here["versions"] |= versions()
    print(f"\n{(end := closing(rows, here))}")
    if output is not None:
        output.with_suffix(".md").write_text(f"{table(rows)}\n\n{end}\n", encoding="utf-8")
        result = {"machine": here, "counts": counts(rows), "rows": [asdict(row) for row in rows]}
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
