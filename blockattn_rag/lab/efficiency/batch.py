"""Several requests at once: time to first token by batch size, and what sharing a prompt saves."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.lab.efficiency.latency import PATHS, check_full_length, paths_of
from blockattn_rag.lab.efficiency.shapes import random_prompt
from blockattn_rag.lab.efficiency.timing import OnProgress, Turns, check_sizes
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.store.memory import MemoryStore


def measure_batch(
    engine: BlockAttentionEngine,
    batch_sizes: Sequence[int],
    *,
    length: int = 8192,
    block_tokens: int = 512,
    question_tokens: int = 50,
    from_host: bool | None = None,
    repeats: int = 3,
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Measure the time to the first tokens of a batch of unrelated requests (TurboRAG, table 4).

    Args:
        engine: as for :func:`measure_ttft`; its store must hold the largest batch's contexts.
        batch_sizes: numbers of requests.
        length: context tokens of each request.
        block_tokens, question_tokens, repeats, on_progress: as for :func:`measure_ttft`.
        from_host: measure also with blocks that lie in the host's memory and are transferred for
            every batch; None: where the model is on another device.

    Returns:
        One row for each batch size: ``batch``, ``<path>_s`` (median seconds until every request
        has its first token), the spreads, and ``full_over_<path>``. Paths that transfer blocks are
        called ``copy_from_host`` and ``relay_from_host``.
    """
    check_sizes(length=length, block_tokens=block_tokens, batch=min(batch_sizes, default=0))
    _check_batches(engine)
    turns = Turns(repeats, len(batch_sizes), on_progress)
    vocabulary = engine.model.config.vocab_size
    prompts = [
        random_prompt(length, block_tokens, question_tokens, vocabulary, seed)
        for seed in range(max(batch_sizes))
    ]
    if from_host is None:
        from_host = engine.model.device.type != "cpu"
    engines = {"": engine}
    if from_host:
        engines["_from_host"] = BlockAttentionEngine(
            engine.model, _HostStore(sys.maxsize), resident_bytes=0
        )
    for one in engines.values():
        _encode(one, prompts)
    rows = []
    for batch in batch_sizes:
        ways = {
            path + place: partial(_first_tokens, one, prompts[:batch], path)
            for place, one in engines.items()
            for path in paths_of(engine)[1:]
        }
        full = {"full": partial(_first_tokens, engine, prompts[:batch], "full")}
        row = {"batch": batch, "length": length, **turns.measure(full | ways)}
        row |= {f"full_over_{way}": row["full_s"] / row[f"{way}_s"] for way in ways}
        rows.append(row)
    return rows


def measure_shared(
    engine: BlockAttentionEngine,
    batch_sizes: Sequence[int],
    *,
    system_tokens: Sequence[int] = (512, 1024, 2048),
    context_tokens: int = 128,
    question_tokens: int = 16,
    new_tokens: int = 32,
    repeats: int = 3,
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Measure tokens per second of requests that share a system prompt (RelayAttention, table 2).

    Shared, the system prompt is read once per layer and step for the whole batch (relay);
    unshared, every request has its own copy (copy). Both batches are one forward per step.

    Args:
        engine: as for :func:`measure_ttft`; it must support relay.
        batch_sizes: numbers of requests.
        system_tokens: lengths of the shared block.
        context_tokens: tokens of each request's own block.
        question_tokens: tokens of each request's final block.
        new_tokens: tokens generated for each request, at least 2.
        repeats, on_progress: as for :func:`measure_ttft`.

    Returns:
        One row for each length of the system prompt and batch size: ``system_tokens``, ``batch``;
        ``shared_tokens_per_s`` and ``unshared_tokens_per_s`` from request to last token with
        their spreads, and their quotient ``gain``; the same for the steps after the first token
        alone, ``decode_gain``; and ``bytes_ratio``, how many times fewer keys and values
        attention reads when shared: b (s + c) / (s + b c), the leading terms of
        RelayAttention's equation 10, which is a bound that weights and other work keep away.
    """
    check_sizes(context_tokens=context_tokens, question_tokens=question_tokens)
    check_sizes(**{"new_tokens less one": new_tokens - 1, "batch": min(batch_sizes, default=0)})
    _check_batches(engine)
    if not engine.model.supports_relay:
        raise ValueError(f"{engine.model.name} does not share blocks: relay is not exact for it")
    turns = Turns(repeats, len(batch_sizes) * len(system_tokens), on_progress)
    rows = []
    for system in system_tokens:
        prompts = _sharing(engine, max(batch_sizes), system, context_tokens, question_tokens)
        _encode(engine, prompts)
        for batch in batch_sizes:
            decode: dict[str, list[float]] = {"unshared": [], "shared": []}
            ways = {
                way: partial(_tokens_per_s, engine, prompts[:batch], path, new_tokens, decode[way])
                for way, path in (("unshared", "copy"), ("shared", "relay"))
            }
            row: dict[str, Any] = {"system_tokens": system, "batch": batch}
            row |= turns.measure(ways, "tokens_per_s")
            row["gain"] = row["shared_tokens_per_s"] / row["unshared_tokens_per_s"]
            # The first run of each warmed up.
            steps = {name: statistics.median(times[1:]) for name, times in decode.items()}
            row["decode_gain"] = steps["unshared"] / steps["shared"]
            own = batch * context_tokens
            row["bytes_ratio"] = (batch * system + own) / (system + own)
            rows.append(row)
    return rows


def _tokens_per_s(
    engine: BlockAttentionEngine,
    prompts: Sequence[BlockPrompt],
    path: str,
    new_tokens: int,
    decode: list[float],
) -> float:
    """From request to last token; the seconds after the first token are appended to ``decode``."""
    answers = engine.generate_batch(
        prompts, batch_size=len(prompts), max_new_tokens=new_tokens, **PATHS[path]
    )
    for answer in answers:
        check_full_length(answer.stats, new_tokens)
    stats = answers[0].stats
    decode.append(stats.total_s - stats.ttft_s)
    return len(prompts) * new_tokens / stats.total_s


def _sharing(
    engine: BlockAttentionEngine, count: int, system: int, context: int, question: int
) -> list[BlockPrompt]:
    vocabulary = engine.model.config.vocab_size
    shared = random_prompt(system, system, 1, vocabulary, seed=-1).context
    own = [random_prompt(context, context, question, vocabulary, seed) for seed in range(count)]
    return [BlockPrompt((*shared, *prompt.context), prompt.final) for prompt in own]


def _check_batches(engine: BlockAttentionEngine) -> None:
    """Refuse a model whose requests are answered one by one: a time would be one request's."""
    if not engine.model.batches_exactly(Sampling(max_new_tokens=1)):
        raise ValueError(
            f"{engine.model.name} is not answered in batches (sliding windows, or a generation "
            "config with penalties or beams); measure `bench ttft` and `bench decode`"
        )


class _HostStore(MemoryStore):
    """Holds blocks in the host's memory, whichever device computed them."""

    def put(self, key: str, kv: BlockKV) -> None:
        super().put(key, kv.to(torch.device("cpu")))


def _encode(engine: BlockAttentionEngine, prompts: Sequence[BlockPrompt]) -> None:
    for prompt in prompts:
        engine.generate(prompt, max_new_tokens=1)


def _first_tokens(engine: BlockAttentionEngine, prompts: Sequence[BlockPrompt], path: str) -> float:
    size = len(prompts)
    answers = engine.generate_batch(prompts, batch_size=size, max_new_tokens=1, **PATHS[path])
    return answers[0].stats.ttft_s
