"""What users of LangChain and LlamaIndex do, run with this package's models and with the
frameworks' own local ones, where these are installed: works with reuse, works, or fails.

    python benchmarks/use_cases [--only NAME] [--output FILE.json]

A use works if it runs to its end and returns what the framework promises; what an answer says is
not judged. It asks the bundled model, with a chat template that knows tools, over passages that
were ingested. The reuse figure is the share of the tokens of all its prompts that came from stored
blocks. Prints a table; ``--output`` writes it, and the figures as JSON beside it. The peers need
langchain-huggingface and llama-index-llms-huggingface.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from kits import model_folder, own_langchain, own_llama_index, peer_langchain, peer_llama_index
from outcomes import Outcome, Row, counts, summary, table, tried
from registry import Use, all_uses

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.pending import PendingRequest
from blockattn_rag.lab.efficiency import machine
from blockattn_rag.store import MemoryStore

FRAMEWORKS = ("langchain", "langchain-core", "langchain-classic", "langgraph", "llama-index-core")
PEERS = ("langchain-huggingface", "llama-index-llms-huggingface")


@contextmanager
def noted(engine: BlockAttentionEngine) -> Iterator[list[PendingRequest]]:
    """What an engine was asked, in whichever way."""
    asked: list[PendingRequest] = []
    answer_batch = engine.answer_batch

    def note(requests: Sequence[PendingRequest]) -> None:
        asked.extend(requests)
        answer_batch(requests)

    engine.answer_batch = note  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        engine.answer_batch = answer_batch  # type: ignore[method-assign]


def tried_here(use: Use, kit: Any, engine: BlockAttentionEngine, *, trace: bool) -> Outcome:
    """A use, run with a kit of this package's models, and what was reused."""
    with noted(engine) as asked:
        outcome = tried(use, kit, trace=trace)
    if outcome.result != "works":
        return outcome
    stats = [request.answer.result().stats for request in asked]
    total = sum(one.prompt_tokens for one in stats)
    return Outcome("works", None, total, sum(one.reused_tokens for one in stats))


def rows_of(only: str, folder: Path, *, trace: bool) -> Iterator[Row]:
    """Runs the uses whose framework and name have ``only`` in them."""
    path = model_folder(folder)
    # No tails are kept (`engine.tails`): the uses ask one question again and again.
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
    """Of the frameworks and of the peers that are installed."""
    found = {}
    for name in (*FRAMEWORKS, *PEERS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def closing(rows: Sequence[Row], here: dict[str, Any]) -> str:
    """What stands below the table: counts, the machine, versions."""
    named = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    return f"{summary(rows)}\n\n*{here['processor']}, {here['threads']} threads; {named}.*"


def main(
    only: Annotated[str, typer.Option(help="Uses whose name has this in it.")] = "",
    output: Annotated[Path | None, typer.Option(help="A .json file; .md goes beside it.")] = None,
    trace: Annotated[bool, typer.Option(help="Print the traceback of what fails.")] = False,
) -> None:
    """Run the uses; print a table."""
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
