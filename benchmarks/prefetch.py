"""Time to first token with a slow store and a reranker, with and without prefetching.

    python benchmarks/prefetch.py [--passages 10] [--read-ms 20] [--reranker-ms 300]

Each read of the store takes ``--read-ms``; between the retriever and the question lie
``--reranker-ms`` in which nothing else happens. Every run has a new engine, so that nothing is in
memory; the ways take turns. It prints one JSON object with medians and extremes in seconds: of the
time to the first token, of what of it was spent on fetching, and of the blocks found. The model has
random weights: only times are looked at.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from typing import Annotated, Any

import typer

from blockattn_rag import BlockAttentionEngine, DirectoryStore
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.lab.efficiency import machine
from blockattn_rag.lab.efficiency.shapes import (
    counting_tokenizer,
    random_llama,
    random_prompt,
)
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import BlockPrompt


class SlowStore(DirectoryStore):
    """A store whose reads take ``read_s`` longer."""

    read_s = 0.0

    def get(self, key: str) -> BlockKV | None:
        time.sleep(self.read_s)
        return super().get(key)


def ask(
    model: BlockModel, store: SlowStore, prompt: BlockPrompt, *, ahead: bool, reranker_s: float
) -> Any:
    """Figures of one question."""
    engine = BlockAttentionEngine(model, store, on_miss="error")
    if ahead:
        engine.prefetch(prompt.context)
    time.sleep(reranker_s)
    return engine.generate(prompt, max_new_tokens=1).stats


def main(
    passages: int = 10,
    tokens: int = 128,
    read_ms: Annotated[float, typer.Option()] = 20.0,
    reranker_ms: Annotated[float, typer.Option()] = 300.0,
    repeats: int = 7,
) -> None:
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    llama = random_llama("135m", max_tokens=8192, device="cpu", dtype="float32")
    model = BlockModel(llama, counting_tokenizer(llama.config.vocab_size))
    prompt = random_prompt(passages * tokens, tokens, 32, llama.config.vocab_size)
    runs: dict[bool, list[Any]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        store = SlowStore(folder)
        BlockAttentionEngine(model, store).encode(prompt)
        store.read_s = read_ms / 1e3
        for number in range(repeats + 1):
            for ahead, found in runs.items():
                stats = ask(model, store, prompt, ahead=ahead, reranker_s=reranker_ms / 1e3)
                if number:  # the first of each warms up
                    found.append(stats)

    def figures(found: list[Any], name: str) -> dict[str, float]:
        values = [getattr(stats, name) for stats in found]
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    told = {
        "machine": machine(model.device),
        "passages": passages,
        "read_ms": read_ms,
        "reranker_ms": reranker_ms,
        **{
            name: {key: figures(found, key) for key in ("ttft_s", "fetch_s", "hits")}
            for name, found in (("without", runs[False]), ("with", runs[True]))
        },
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    typer.run(main)
