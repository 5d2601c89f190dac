"""Measure the fidelity, size and latency of quantized keys and values.

    python benchmarks/kv_precision.py --data nq_rag.jsonl.gz --output kv.jsonl --recipe head:4

Full mode answers each question greedily. Block mode then predicts this answer with the same
passages, with keys and values in the model's data type, in int8, or in 4 bits. The 4-bit
quantization is an experiment: as in KIVI (arXiv 2402.02750), it is asymmetric, in groups of tokens
per channel (keys) and of channels per token (values). For each type, the script prints the
divergence from full mode, the increase caused by quantization, the divergence from block mode in
the model's data type, the share of tokens on which full mode agrees, and the bytes per token. It
also prints the median time to first token from memory and from disk without page cache,
alternating between types. An interrupted run resumes from --output, but times are always measured
again.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import machine
from torch import Tensor

from blockattn_rag import BlockAttentionEngine, DirectoryStore, MemoryStore
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.lab.evaluation.accuracy import make_prompt
from blockattn_rag.lab.evaluation.datasets import EvaluationSample, read_samples
from blockattn_rag.lab.evaluation.fidelity import FidelityRecord, full_answer
from blockattn_rag.lab.evaluation.metrics import bootstrap_mean
from blockattn_rag.lab.evaluation.records import Row
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.formats import CHAT

STORE_BYTES = 1 << 28
KINDS: tuple[KVDtype, ...] = ("model", "int8")


def rounded(states: Tensor, dim: int, group: int, bits: int = 4) -> Tensor:
    """Quantize and dequantize states, with a float16 offset and step for each group."""
    found = []
    for part in torch.split(states.float(), group, dim):
        least = part.amin(dim, keepdim=True).half().float()
        step = ((part.amax(dim, keepdim=True) - least) / (2**bits - 1)).half().float()
        codes = ((part - least) / step.clamp_min(1e-7)).round().clamp(0, 2**bits - 1)
        found.append(least + codes * step)
    return torch.cat(found, dim).to(states.dtype)


class RoundingStore(MemoryStore):
    """Store that quantizes blocks to 4 bits."""

    def __init__(self, group: int) -> None:
        super().__init__(STORE_BYTES)
        self.group = group

    def put(self, key: str, kv: BlockKV) -> None:
        keys = tuple(rounded(states, 1, self.group) for states in kv.keys)
        values = tuple(rounded(states, 2, self.group) for states in kv.values)
        super().put(key, replace(kv, keys=keys, values=values))

    def bytes_of(self, states: int) -> float:
        """Return the size of stored states: half a byte per number, and 4 bytes per group."""
        return states * (0.5 + 4 / self.group)


def engines_of(model: BlockModel, recipe: str) -> dict[str, BlockAttentionEngine]:
    """Return an engine for each row of the table, by the row's name."""
    rows: dict[str, BlockAttentionEngine] = {}
    for kind in KINDS:
        store = MemoryStore(STORE_BYTES)
        rows[kind] = BlockAttentionEngine(
            model, store, recipe=recipe, kv_dtype=kind, on_miss="error"
        )
    for group in (32, 16):
        rounding = RoundingStore(group)
        rows[f"4 bits in groups of {group}"] = BlockAttentionEngine(
            model, rounding, recipe=recipe, on_miss="error"
        )
    return rows


def prepare(engines: Mapping[str, BlockAttentionEngine], prompt: BlockPrompt) -> None:
    """Encode a prompt's blocks once, and store them in each engine's empty store, in the type of
    that engine."""
    plain = engines["model"]
    for engine in engines.values():
        for key in list(engine.store.keys()):
            engine.store.delete(key)
    plain.precompute(prompt.context, as_prompt=True)
    for name, engine in engines.items():
        for key in list(plain.store.keys()):
            kv = plain.store.get(key)
            if kv is not None and engine is not plain:
                engine.store.put(key, kv.quantized() if name == "int8" else kv)


def compare(
    engines: Mapping[str, BlockAttentionEngine],
    sample: EvaluationSample,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Measure the divergence of all types on one question."""
    engine = engines["model"]
    prompt = make_prompt(engine, CHAT, sample)
    answer, expected = full_answer(engine, prompt, max_new_tokens)
    row: dict[str, Any] = {"id": sample.id}
    plain: Tensor | None = None
    prepare(engines, prompt)
    for name, one in engines.items():
        logits = one.answer_logits(prompt, answer)
        plain = logits.double().log_softmax(-1) if plain is None else plain
        found = FidelityRecord.compared(sample, Row(name), logits, expected)
        beside = FidelityRecord.compared(sample, Row(name), logits, plain)
        row[name] = {"kl": found.kl, "agree": found.agreement, "from_model": beside.kl}
    return row


def bytes_per_token(engine: BlockAttentionEngine) -> float:
    """Return the bytes per token of the blocks in an engine's store."""
    store = engine.store
    blocks = [kv for key in list(store.keys()) if (kv := store.get(key)) is not None]
    tokens = sum(kv.num_tokens for kv in blocks)
    if isinstance(store, RoundingStore):
        states = sum(t.numel() for kv in blocks for t in (*kv.keys, *kv.values))
        return store.bytes_of(states) / tokens
    return sum(kv.nbytes for kv in blocks) / tokens


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that they are read from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def times(
    model: BlockModel, samples: Sequence[EvaluationSample], recipe: str, repeats: int, folder: Path
) -> dict[str, float]:
    """Return the median time to first token in seconds, by type and location of the blocks."""
    how: dict[str, Any] = {"recipe": recipe, "on_miss": "error", "resident_bytes": 0}
    cases: dict[str, tuple[BlockAttentionEngine, Callable[[], None]]] = {}
    for kind in KINDS:
        memory, disk = MemoryStore(STORE_BYTES), DirectoryStore(folder / kind)
        held = BlockAttentionEngine(model, memory, kv_dtype=kind, **how)
        read = BlockAttentionEngine(model, disk, kv_dtype=kind, **how)
        cases[f"{kind}, memory"] = held, lambda: None
        cases[f"{kind}, disk"] = read, partial(forget, folder / kind)
    found: dict[str, list[float]] = {name: [] for name in cases}
    for sample in samples:
        prompt = make_prompt(held, CHAT, sample)
        for engine, _ in cases.values():
            engine.precompute(prompt.context, as_prompt=True)
        for _ in range(1 + repeats):  # The first run is a warm-up.
            for name, (engine, before) in cases.items():
                before()
                stats = engine.generate(prompt, max_new_tokens=1).stats
                found[name].append(stats.ttft_s)
    per_sample = 1 + repeats
    return {
        name: statistics.median(s for at, s in enumerate(taken) if at % per_sample)
        for name, taken in found.items()
    }


def shown(rows: Sequence[Mapping[str, Any]], sizes: Mapping[str, float]) -> None:
    print(f"{'':26} {'KL':>7} {'more than model (95 %)':>28} {'from model':>10} {'agree':>6} bytes")
    for name, size in sizes.items():
        kl = bootstrap_mean([row[name]["kl"] for row in rows])
        more = bootstrap_mean([row[name]["kl"] - row["model"]["kl"] for row in rows])
        beside = bootstrap_mean([row[name]["from_model"] for row in rows])
        agree = bootstrap_mean([row[name]["agree"] for row in rows])
        print(
            f"{name:26} {kl.mean:7.4f} {more.mean:+10.5f} ({more.low:+.5f}, {more.high:+.5f}) "
            f"{beside.mean:10.5f} {agree.mean:6.1%} {size:.0f} ({size / sizes['model']:.3f})"
        )


def main(
    data: Annotated[Path, typer.Option()],
    output: Annotated[Path, typer.Option()],
    recipe: str = "head:4",
    model: str = "smollm2",
    dtype: str = "bfloat16",
    limit: int = 500,
    num_passages: int = 5,
    max_new_tokens: int = 24,
    timed: Annotated[int, typer.Option(help="Number of questions to time.")] = 20,
    repeats: int = 3,
) -> None:
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    loaded = BlockModel.from_pretrained(model, dtype=dtype)
    engines = engines_of(loaded, recipe)
    samples = [s.with_passages(num_passages) for s in read_samples(data, limit=limit)]
    lines = output.read_text().splitlines() if output.exists() else []
    done = {row["id"]: row for row in map(json.loads, lines)}
    for sample in samples:
        if sample.id not in done:
            done[sample.id] = compare(engines, sample, max_new_tokens)
            with output.open("a") as file:
                file.write(json.dumps(done[sample.id]) + "\n")
    # If a previous run compared all questions, the stores are empty.
    prepare(engines, make_prompt(engines["model"], CHAT, samples[0]))
    print(f"{model}, {dtype}, {recipe}, {len(samples)} questions, {num_passages} passages")
    shown([done[s.id] for s in samples], {n: bytes_per_token(e) for n, e in engines.items()})
    with tempfile.TemporaryDirectory() as folder:
        taken = times(loaded, samples[:timed], recipe, repeats, Path(folder))
    print(f"\nTime to first token, median of {timed} questions, {repeats} times each")
    for name, seconds in taken.items():
        print(f"{name:26} {1000 * seconds:8.1f} ms")
    print(json.dumps({"machine": machine(), "ttft_s": taken}))


if __name__ == "__main__":
    typer.run(main)
