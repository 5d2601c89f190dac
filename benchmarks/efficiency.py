"""Measure the latency, throughput and memory of block mode and full prefill.

    python benchmarks/efficiency.py ttft --lengths 512,4096
    python benchmarks/efficiency.py decode --lengths 2048,8192 --block-tokens 128,512
    python benchmarks/efficiency.py batch --lengths 4096 --batch-sizes 1,2,4
    python benchmarks/efficiency.py memory --lengths 2048,8192
    python benchmarks/efficiency.py shared --lengths 2048 --batch-sizes 32
    python benchmarks/efficiency.py ingest --lengths 64,128,512
    python benchmarks/efficiency.py recompute --lengths 1000,2000,4000,8000 --layers 4
    python benchmarks/efficiency.py windows --lengths 4096 --layers 6
    python benchmarks/efficiency.py passages --lengths 4096 --layers 4 --kind hybrid
    python benchmarks/efficiency.py decode --lengths 4096 --layers 4 --kind latent

``ttft``: time to first token. ``decode``: time per token. ``batch``: time to first token of a
batch. ``memory``: peak memory of a request. ``shared``: throughput of requests that share a system
prompt (RelayAttention). ``ingest``: throughput of encoding blocks. ``recompute``: time to first
token by the share of recomputed tokens. ``windows``: time to first token with and without sliding
windows. ``passages``: time to first token by number of passages. The result is printed as JSON.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
import typer
from measuring import (
    PATHS,
    check_batches,
    check_full_length,
    check_sizes,
    in_turns,
    machine,
    on_path,
    paths_of,
    peak_bytes,
    store_contexts,
)
from random_models import Kind, counting_tokenizer, random_llama, random_prompt
from torch import Tensor
from transformers import DynamicCache

from blockattn_rag import BlockAttentionEngine, BlockModel, MemoryStore, Recipe
from blockattn_rag.app.cli.output import duration
from blockattn_rag.app.cli.output import size as bytes_of
from blockattn_rag.lab.planning import SHAPES, prefill_flops
from blockattn_rag.model import EncodeRequest
from blockattn_rag.model.loading import load_model
from blockattn_rag.prompts import BlockPrompt

Row = Mapping[str, Any]
Measured = Literal[
    "ttft", "decode", "batch", "memory", "shared", "ingest", "recompute", "windows", "passages"
]
WINDOW = 512
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


def measure_ttft(
    engine: BlockAttentionEngine,
    lengths: Sequence[int],
    *,
    block_tokens: int = 512,
    question_tokens: int = 50,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Measure the time to first token on every path, alternating between paths.

    Blocks are encoded in advance and read from the engine's store. A miss is an error.

    Args:
        engine: Engine with a ``counting_tokenizer`` for the model's vocabulary, a store that fits
            the blocks of the longest context, and ``resident_bytes=0``, so that repeated
            questions are recomputed.
        lengths: Context lengths in tokens, without the question.
        block_tokens: Tokens per block.
        question_tokens: Number of tokens in the final block.
        repeats: Number of timed runs on each path.

    Returns:
        One row for each length: ``length`` and ``blocks``; for each path ``<path>_s`` (median,
        seconds), ``<path>_min_s`` and ``<path>_max_s``; for the paths that reuse blocks,
        ``full_over_<path>`` and ``<path>_over_floor``; and the operation counts ``full_flops``
        and ``block_flops``, with ``flops_ratio`` (full over block) and ``flops_over_floor``
        (block over a prompt with only the question).
    """
    check_sizes(block_tokens=block_tokens, question_tokens=question_tokens)
    check_sizes(**{"the shortest length": min(lengths, default=0)})
    config = engine.model.config
    paths = paths_of(engine)
    floor = prefill_flops(config, question_tokens)
    engines = {path: on_path(engine, path) for path in (*paths, "floor")}
    rows = []
    for length in lengths:
        prompt = random_prompt(length, block_tokens, question_tokens, config.vocab_size)
        engine.generate(prompt, max_new_tokens=1)
        ways = {path: partial(_ttft, one, prompt, path) for path, one in engines.items()}
        row = {"length": length, "blocks": len(prompt.context), **in_turns(ways, repeats)}
        for path in paths[1:]:
            row[f"full_over_{path}"] = row["full_s"] / row[f"{path}_s"]
            row[f"{path}_over_floor"] = row[f"{path}_s"] / row["floor_s"]
        full = prefill_flops(config, length + question_tokens)
        block = prefill_flops(config, question_tokens, length)
        row |= {"full_flops": full, "block_flops": block}
        rows.append(row | {"flops_ratio": full / block, "flops_over_floor": block / floor})
    return rows


def _ttft(engine: BlockAttentionEngine, prompt: BlockPrompt, path: str) -> float:
    asked = BlockPrompt((), prompt.final) if path == "floor" else prompt
    return engine.generate(asked, max_new_tokens=1, **PATHS[path]).stats.ttft_s


def measure_decode(
    engine: BlockAttentionEngine,
    lengths: Sequence[int],
    *,
    block_tokens: Sequence[int] = (128, 512),
    question_tokens: int = 50,
    new_tokens: int = 32,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Measure the time per token after the first on every path, alternating between paths.

    Args:
        engine, lengths, question_tokens, repeats: See ``measure_ttft``.
        block_tokens: Block sizes in tokens. Each size gives one row per length.
        new_tokens: Number of tokens to generate, at least 2. The time to first token is excluded.
            On the relay path, the time of the second token includes concatenating small blocks.

    Returns:
        One row for each length and block size: ``length``, ``block_tokens``, ``<path>_s`` (median
        seconds per token) with ``<path>_min_s`` and ``<path>_max_s``, and ``relay_over_copy``.
    """
    check_sizes(question_tokens=question_tokens)
    if new_tokens < 2:
        raise ValueError(f"Expected new_tokens of at least 2, found {new_tokens}.")
    check_sizes(**{"the shortest length": min(lengths), "block_tokens": min(block_tokens)})
    engines = {path: on_path(engine, path) for path in paths_of(engine)}
    vocabulary = engine.model.config.vocab_size
    rows = []
    for length in lengths:
        for size in block_tokens:
            prompt = random_prompt(length, size, question_tokens, vocabulary)
            engine.generate(prompt, max_new_tokens=1)
            ways = {
                path: partial(_per_token, one, prompt, path, new_tokens)
                for path, one in engines.items()
            }
            row = {"length": length, "block_tokens": size, **in_turns(ways, repeats)}
            if "relay" in ways:
                row["relay_over_copy"] = row["relay_s"] / row["copy_s"]
            rows.append(row)
    return rows


def _per_token(
    engine: BlockAttentionEngine, prompt: BlockPrompt, path: str, new_tokens: int
) -> float:
    stats = engine.generate(prompt, max_new_tokens=new_tokens, **PATHS[path]).stats
    check_full_length(stats, new_tokens)
    return (stats.total_s - stats.ttft_s) / (new_tokens - 1)


def measure_batch(
    engine: BlockAttentionEngine,
    batch_sizes: Sequence[int],
    *,
    length: int = 8192,
    block_tokens: int = 512,
    question_tokens: int = 50,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Measure the time to first token of batches of unrelated requests (TurboRAG, table 4).

    Args:
        engine: See ``measure_ttft``; the store must fit the contexts of the largest batch.
        batch_sizes: Batch sizes to measure.
        length: Number of context tokens per request.
        block_tokens, question_tokens, repeats: See ``measure_ttft``.

    Returns:
        One row for each batch size: ``batch``, ``<path>_s`` (median seconds until every request
        has its first token) with ``<path>_min_s`` and ``<path>_max_s``, and ``full_over_<path>``.
    """
    check_sizes(length=length, block_tokens=block_tokens, batch=min(batch_sizes, default=0))
    check_batches(engine)
    vocabulary = engine.model.config.vocab_size
    prompts = [
        random_prompt(length, block_tokens, question_tokens, vocabulary, seed)
        for seed in range(max(batch_sizes))
    ]
    store_contexts(engine, prompts)
    rows = []
    paths = paths_of(engine)
    engines = {path: on_path(engine, path) for path in paths}
    for batch in batch_sizes:
        ways = {
            path: partial(_first_tokens, one, prompts[:batch], path)
            for path, one in engines.items()
        }
        row = {"batch": batch, "length": length, **in_turns(ways, repeats)}
        row |= {f"full_over_{path}": row["full_s"] / row[f"{path}_s"] for path in paths[1:]}
        rows.append(row)
    return rows


def _first_tokens(engine: BlockAttentionEngine, prompts: Sequence[BlockPrompt], path: str) -> float:
    size = len(prompts)
    answers = engine.generate_batch(prompts, batch_size=size, max_new_tokens=1, **PATHS[path])
    return answers[0].stats.ttft_s


def measure_memory(
    engine: BlockAttentionEngine,
    lengths: Sequence[int],
    *,
    block_tokens: int = 512,
    question_tokens: int = 50,
    new_tokens: int = 8,
) -> list[dict[str, Any]]:
    """Measure the peak memory of a request, from its start to its last token.

    The result is deterministic, because only tensors allocated by PyTorch are counted. Blocks are
    stored in advance and not counted.

    The memory of relay depends on ``block_tokens``, because relay copies small blocks into
    additional tensors (``attention.relay.JoinLimits``). It keeps them from the second token (on an
    accelerator, from the first) until the answer is complete.

    Args:
        engine, lengths, block_tokens, question_tokens: See ``measure_ttft``.
        new_tokens: Number of tokens to generate.

    Returns:
        One row for each length: ``length``; ``<path>_peak_bytes`` for full, copy and relay;
        ``stored_bytes`` of the context's blocks; ``relay_over_copy``.
    """
    check_sizes(block_tokens=block_tokens, **{"the shortest length": min(lengths, default=0)})
    engines = {path: on_path(engine, path) for path in paths_of(engine)}
    vocabulary = engine.model.config.vocab_size
    rows = []
    for length in lengths:
        prompt = random_prompt(length, block_tokens, question_tokens, vocabulary)
        engine.generate(prompt, max_new_tokens=1)
        row: dict[str, Any] = {"length": length}
        for path, one in engines.items():
            work = partial(one.generate, prompt, max_new_tokens=new_tokens, **PATHS[path])
            # The profiler records only this thread. Holding the lock makes the model run in it.
            with engine.model.lock:
                row[f"{path}_peak_bytes"] = peak_bytes(work, engine.model.device)
        row["stored_bytes"] = length * engine.model.bytes_per_token
        if "relay" in engines:
            row["relay_over_copy"] = row["relay_peak_bytes"] / row["copy_peak_bytes"]
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
) -> list[dict[str, Any]]:
    """Measure the throughput of requests that share a system prompt (RelayAttention, table 2).

    Shared: the system prompt is read once per layer and step for the complete batch (relay).
    Unshared: every request reads a separate copy (copy). Both need one forward pass per step.

    Args:
        engine: See ``measure_ttft``. The model must support relay.
        batch_sizes: Batch sizes to measure.
        system_tokens: Lengths of the shared block in tokens.
        context_tokens: Number of tokens in each request's own block.
        question_tokens: Number of tokens in each request's final block.
        new_tokens: Number of tokens to generate per request, at least 2.
        repeats: See ``measure_ttft``.

    Returns:
        One row for each system prompt length and batch size: ``system_tokens``, ``batch``;
        ``shared_tokens_per_s`` and ``unshared_tokens_per_s`` from request to last token, each with
        minimum and maximum, and their ratio ``gain``; ``decode_gain``, the same ratio for the steps
        after the first token; and ``bytes_ratio``, an upper bound of the gain: the ratio of the
        bytes of keys and values that attention reads, unshared to shared, b (s + c) / (s + b c).
        These are the leading terms of RelayAttention's equation 10.
    """
    check_sizes(context_tokens=context_tokens, question_tokens=question_tokens)
    check_sizes(batch=min(batch_sizes, default=0))
    check_sizes(new_tokens=new_tokens - 1)
    check_batches(engine)
    if not engine.model.supports_relay:
        raise ValueError(
            f"{engine.model.name} cannot share blocks: relay attention is not exact for this model"
        )
    engines = {path: on_path(engine, path) for path in ("copy", "relay")}
    rows = []
    for system in system_tokens:
        prompts = sharing_prompts(engine, max(batch_sizes), system, context_tokens, question_tokens)
        store_contexts(engine, prompts)
        for batch in batch_sizes:
            decode: dict[str, list[float]] = {"unshared": [], "shared": []}
            ways = {
                way: partial(
                    _tokens_per_s, engines[path], prompts[:batch], path, new_tokens, decode[way]
                )
                for way, path in (("unshared", "copy"), ("shared", "relay"))
            }
            row: dict[str, Any] = {"system_tokens": system, "batch": batch}
            row |= in_turns(ways, repeats, "tokens_per_s")
            row["gain"] = row["shared_tokens_per_s"] / row["unshared_tokens_per_s"]
            # The first run of each function is a warm-up.
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
    """Return the tokens per second from the request to the last token.

    The seconds after the first token are appended to ``decode``.
    """
    answers = engine.generate_batch(
        prompts, batch_size=len(prompts), max_new_tokens=new_tokens, **PATHS[path]
    )
    for answer in answers:
        check_full_length(answer.stats, new_tokens)
    stats = answers[0].stats
    decode.append(stats.total_s - stats.ttft_s)
    return len(prompts) * new_tokens / stats.total_s


def sharing_prompts(
    engine: BlockAttentionEngine, count: int, system: int, context: int, question: int
) -> list[BlockPrompt]:
    """Return ``count`` prompts, each with the shared block and a separate block."""
    vocabulary = engine.model.config.vocab_size
    shared = random_prompt(system, system, 1, vocabulary, seed=-1).context
    own = [random_prompt(context, context, question, vocabulary, seed) for seed in range(count)]
    return [BlockPrompt((*shared, *prompt.context), prompt.final) for prompt in own]


def measure_ingest(
    model: BlockModel,
    block_tokens: Sequence[int],
    *,
    total_tokens: int = 8192,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Measure the throughput of encoding without a store, and of a plain forward pass.

    The plain forward pass is an upper bound: it computes the same number of tokens in rows of the
    mean block length without padding, and fills a KV cache, too.

    Args:
        model: The model.
        block_tokens: Mean block lengths in tokens, one row for each. The blocks of a row have 0.5
            to 1.5 times as many tokens.
        total_tokens: Approximate number of tokens per run.
        repeats: See ``measure_ttft``.

    Returns:
        One row for each length: ``block_tokens``, ``encode_tokens_per_s`` and
        ``plain_tokens_per_s``, each with minimum and maximum, ``encode_over_plain``, and
        ``bytes_per_token``.
    """
    check_sizes(total_tokens=total_tokens, block_tokens=min(block_tokens, default=0))
    rows = []
    for size in block_tokens:
        requests = _requests(model, size, max(1, total_tokens // size))
        encode = partial(_encode_rate, model, requests)
        plain = partial(_plain_rate, model, _plain_rows(requests, size))
        row: dict[str, Any] = {"block_tokens": size}
        row |= in_turns({"encode": encode, "plain": plain}, repeats, "tokens_per_s")
        row["encode_over_plain"] = row["encode_tokens_per_s"] / row["plain_tokens_per_s"]
        row["bytes_per_token"] = model.bytes_per_token
        rows.append(row)
    return rows


def measure_recompute(
    engine: BlockAttentionEngine,
    lengths: Sequence[int],
    *,
    shares: Sequence[float] = SHARES,
    block_tokens: int = 500,
    question_tokens: int = 50,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Measure the time to first token with recomputation and in full mode, alternating.

    Args:
        engine: See ``measure_ttft``. The model must support relay.
        lengths: Context lengths in tokens, without the question.
        shares: Shares of the tokens to recompute. 0 is block mode.
        block_tokens, question_tokens, repeats: See ``measure_ttft``.

    Returns:
        One row for each length: ``length``, ``full_s``, and ``over_full`` with the ratio to full
        mode for each share.
    """
    check_sizes(question_tokens=question_tokens, length=min(lengths, default=0))
    rows = []
    for length in lengths:
        prompt = random_prompt(
            length, block_tokens, question_tokens, engine.model.config.vocab_size
        )
        engine.generate(prompt, max_new_tokens=1)  # Store the blocks.

        def ttft_s(prompt: BlockPrompt = prompt, **options: Any) -> float:
            answer = engine.generate(prompt, max_new_tokens=1, do_sample=False, **options)
            return answer.stats.ttft_s

        ways = {str(share): partial(ttft_s, recipe=Recipe(recompute=share)) for share in shares}
        times = in_turns({"full": partial(ttft_s, mode="full"), **ways}, repeats)
        ratios = {way: times[f"{way}_s"] / times["full_s"] for way in ways}
        rows.append({"length": length, "full_s": times["full_s"], "over_full": ratios})
    return rows


def measure_windows(
    engine: BlockAttentionEngine,
    windowed: BlockAttentionEngine,
    lengths: Sequence[int],
    *,
    block_tokens: int = 512,
    question_tokens: int = 50,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Measure the time to first token with and without sliding windows, alternating.

    Args:
        engine: See ``measure_ttft``. The model must support relay.
        windowed: Engine for a model of the same shape with sliding windows.
        lengths, block_tokens, question_tokens, repeats: See ``measure_ttft``.

    Returns:
        One row for each length: ``length``; ``<model>_<path>_s`` for the models ``plain`` and
        ``windowed`` on the paths full and relay (median, seconds), with minimum and maximum;
        ``<model>_full_over_relay``; and ``windowed_over_plain``, the ratio of these.
    """
    engines = {"plain": engine, "windowed": windowed}
    rows = []
    for length in lengths:
        vocabulary = engine.model.config.vocab_size
        prompt = random_prompt(length, block_tokens, question_tokens, vocabulary)
        ways = {}
        for name, one in engines.items():
            one.generate(prompt, max_new_tokens=1)
            for path in ("full", "relay"):
                ways[f"{name}_{path}"] = partial(_ttft, on_path(one, path), prompt, path)
        row: dict[str, Any] = {"length": length, **in_turns(ways, repeats)}
        for name in engines:
            row[f"{name}_full_over_relay"] = row[f"{name}_full_s"] / row[f"{name}_relay_s"]
        of_plain = row["plain_full_over_relay"]
        rows.append(row | {"windowed_over_plain": row["windowed_full_over_relay"] / of_plain})
    return rows


def measure_passages(
    engine: BlockAttentionEngine,
    lengths: Sequence[int],
    *,
    passages: Sequence[int] = (1, 3, 6),
    head_tokens: int = 32,
    question_tokens: int = 50,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Measure the time to first token for different numbers of passages, alternating.

    Args:
        engine: See ``measure_ttft``.
        lengths: Total number of tokens in all passages, at least one per passage.
        passages: Numbers of passages, which have equal length.
        head_tokens: Number of tokens in the block before the passages. A hybrid model starts from
            the states after this block.
        question_tokens, repeats: See ``measure_ttft``.

    Returns:
        One row for each length and number of passages: ``length``, ``passages``, ``full_s``,
        ``block_s`` and, for models with latent attention, ``copy_s`` (median, seconds), with
        minimum and maximum, ``full_over_block``, ``full_over_copy``, and ``bytes_per_token``.
    """
    check_sizes(**{"the shortest passage": min(lengths) // max(passages)})
    model, paths = engine.model, ["block"]
    if any(kind.attention == "latent" for kind in model.profile.kinds):
        paths.append("copy")
    engines = {path: on_path(engine, path) for path in paths}
    vocabulary, rows = model.config.vocab_size, []
    head = random_prompt(head_tokens, head_tokens, 1, vocabulary, seed=-1).context
    for length in lengths:
        ways: dict[str, Callable[[], float]] = {}
        for count in passages:
            prompt = random_prompt(length, -(-length // count), question_tokens, vocabulary)
            prompt = BlockPrompt((*head, *prompt.context), prompt.final)
            engine.generate(prompt, max_new_tokens=1)
            ways["full"] = partial(_ttft, engine, prompt, "full")
            for path, one in engines.items():
                ways[f"{path} {count}"] = partial(_ttft, one, prompt, path)
        times = in_turns(ways, repeats)
        for count in passages:
            row: dict[str, Any] = {"length": length, "passages": count}
            for path, way in {
                "full": "full",
                **{path: f"{path} {count}" for path in paths},
            }.items():
                row |= {f"{path}{end}": times[f"{way}{end}"] for end in ("_s", "_min_s", "_max_s")}
            row |= {f"full_over_{path}": row["full_s"] / row[f"{path}_s"] for path in paths}
            rows.append(row | {"bytes_per_token": model.bytes_per_token})
    return rows


def _requests(model: BlockModel, size: int, count: int) -> list[EncodeRequest]:
    draw, vocabulary = random.Random(size), model.config.vocab_size
    lengths = [draw.randint(max(1, size // 2), size + size // 2) for _ in range(count)]
    return [
        EncodeRequest([draw.randrange(vocabulary) for _ in range(length)], str(index), "")
        for index, length in enumerate(lengths)
    ]


def _plain_rows(requests: Sequence[EncodeRequest], size: int) -> Tensor:
    flat = [token for request in requests for token in request.token_ids]
    width = min(size, len(flat))
    return torch.tensor(flat[: len(flat) // width * width]).reshape(-1, width)


def _encode_rate(model: BlockModel, requests: Sequence[EncodeRequest]) -> float:
    started = time.perf_counter()
    for _ in model.encode(requests):
        pass
    _wait_for(model.device)
    return sum(len(r.token_ids) for r in requests) / (time.perf_counter() - started)


@torch.inference_mode()
def _plain_rate(model: BlockModel, rows: Tensor) -> float:
    started = time.perf_counter()
    for batch in torch.split(rows.to(model.device), max(1, model.batch_tokens // rows.shape[1])):
        model.hf_model(
            input_ids=batch, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1
        )
    _wait_for(model.device)
    return rows.numel() / (time.perf_counter() - started)


def _wait_for(device: torch.device) -> None:
    """Wait until the accelerator has finished all pending work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def columns(measured: Measured, rows: Sequence[Row]) -> dict[str, list[str]]:
    """Format a result as a table: lists of cells by column name. Times are medians."""
    if measured in ("shared", "ingest"):
        found = {
            head: [format(row[name], form) for row in rows]
            for head, (name, form) in _RATES[measured].items()
        }
        if measured == "ingest":
            found["stored per token"] = [bytes_of(row["bytes_per_token"]) for row in rows]
        return found
    if measured == "windows":
        found = {"context": [f"{row['length']:,}" for row in rows]}
        for name in ("plain", "windowed"):
            for path in ("full", "relay"):
                times = [duration(row[f"{name}_{path}_s"]) for row in rows]
                found[f"{path}, {name}"] = times
            ratios = [f"{row[f'{name}_full_over_relay']:.1f}" for row in rows]
            found[f"full/relay, {name}"] = ratios
        found["quotient"] = [f"{row['windowed_over_plain']:.2f}" for row in rows]
        return found
    if measured == "passages":
        found = {name: [f"{row[name]:,}" for row in rows] for name in ("length", "passages")}
        paths = [path for path in ("full", "copy", "block") if f"{path}_s" in rows[0]]
        for path in paths:
            found[path] = [duration(row[f"{path}_s"]) for row in rows]
        for path in paths[1:]:
            found[f"full/{path}"] = [f"{row[f'full_over_{path}']:.1f}" for row in rows]
        found["bytes per token"] = [f"{row['bytes_per_token']:,}" for row in rows]
        return found
    if measured == "recompute":
        by_share = {
            f"{float(share):.0%}": [f"{row['over_full'][share]:.2f}" for row in rows]
            for share in rows[0]["over_full"]
        }
        return {"context": [f"{row['length']:,}" for row in rows], **by_share}
    sizes = {"context": "length", "block": "block_tokens", "requests": "batch"}
    if measured == "batch":
        del sizes["context"]
    found = {head: [f"{r[n]:,}" for r in rows] for head, n in sizes.items() if n in rows[0]}
    for path in PATHS:
        if f"{path}_s" in rows[0]:
            found[path] = [duration(row[f"{path}_s"]) for row in rows]
        elif f"{path}_peak_bytes" in rows[0]:
            found[path] = [bytes_of(row[f"{path}_peak_bytes"]) for row in rows]
    if measured == "memory":
        found["stored blocks"] = [bytes_of(row["stored_bytes"]) for row in rows]
    quotients = {
        "full/copy": ("full_over_copy", ".1f"),
        "full/relay": ("full_over_relay", ".1f"),
        "relay/copy": ("relay_over_copy", ".3f" if measured == "memory" else ".2f"),
        "FLOPs ratio": ("flops_ratio", ".0f"),
    }
    for head, (name, form) in quotients.items():
        if name in rows[0]:
            found[head] = [format(row[name], form) for row in rows]
    return found


_RATES = {
    "shared": {
        "system": ("system_tokens", ","),
        "requests": ("batch", ","),
        "unshared": ("unshared_tokens_per_s", ".1f"),
        "shared": ("shared_tokens_per_s", ".1f"),
        "gain": ("gain", ".2f"),
        "decode gain": ("decode_gain", ".2f"),
        "equation 10": ("bytes_ratio", ".1f"),
    },
    "ingest": {
        "block": ("block_tokens", ","),
        "encoding": ("encode_tokens_per_s", ".0f"),
        "plain forward": ("plain_tokens_per_s", ".0f"),
        "encoding/plain": ("encode_over_plain", ".2f"),
    },
}
"""Columns of the throughput tables: field of a row, and its format."""


def main(
    measured: Annotated[Measured, typer.Argument(help="What to measure.")],
    lengths: Annotated[
        str, typer.Option(help="Tokens per context, system prompt or block, comma-separated.")
    ],
    model: Annotated[
        str, typer.Option(help="Shape of a Llama with random weights, or a model name or folder.")
    ] = "135m",
    block_tokens: Annotated[
        str | None, typer.Option(help="Tokens per block; `decode` accepts several.")
    ] = None,
    batch_sizes: Annotated[
        str, typer.Option(help="Requests per batch, for `batch` and `shared`.")
    ] = "1,8,32",
    repeats: Annotated[int, typer.Option(help="Number of timed runs; medians are reported.")] = 3,
    dtype: Annotated[str, typer.Option(help="Data type of the weights.")] = "float32",
    layers: Annotated[int | None, typer.Option(help="Number of layers to keep.")] = None,
    kind: Annotated[Kind, typer.Option(help="Attention type of a shape.")] = "plain",
) -> None:
    """Run a measurement, and print the result as JSON."""
    # The warning about missing block fine-tuning is irrelevant for random weights.
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    sizes, batches = _numbers(lengths), _numbers(batch_sizes)
    made = partial(random_llama, model, max_tokens=max(sizes) + 256, dtype=dtype)
    loaded = made(kind=kind) if model in SHAPES else load_model(model, dtype=dtype)
    engine = _engine(loaded, layers)
    options: dict[str, Any] = {} if measured == "memory" else {"repeats": repeats}
    if block_tokens is not None:
        blocks = _numbers(block_tokens)
        options["block_tokens"] = blocks if measured == "decode" else blocks[0]
    if measured == "batch":
        rows = measure_batch(engine, batches, length=sizes[0], **options)
    elif measured == "shared":
        rows = measure_shared(engine, batches, system_tokens=sizes, **options)
    elif measured == "ingest":
        rows = measure_ingest(engine.model, sizes, **options)
    elif measured == "windows":
        rows = measure_windows(engine, _engine(made(window=WINDOW), layers), sizes, **options)
    else:
        measures: Mapping[str, Callable[..., list[dict[str, Any]]]] = {
            "ttft": measure_ttft,
            "decode": measure_decode,
            "memory": measure_memory,
            "recompute": measure_recompute,
            "passages": measure_passages,
        }
        rows = measures[measured](engine, sizes, **options)
    device = engine.model.device
    data = {"model": model, "kind": kind, "dtype": dtype, "device": str(device), **options}
    data["layers"] = loaded.config.num_hidden_layers
    print(json.dumps({**data, "rows": rows, "machine": machine(device)}))


def _engine(hf_model: Any, layers: int | None) -> BlockAttentionEngine:
    """Return an engine for a model that is truncated to its first layers."""
    if layers is not None:
        hf_model.model.layers = hf_model.model.layers[:layers]
        hf_model.config.num_hidden_layers = layers
        if getattr(hf_model.config, "layer_types", None):
            hf_model.config.layer_types = hf_model.config.layer_types[:layers]
    is_hybrid = "linear_attention" in (getattr(hf_model.config, "layer_types", None) or ())
    return BlockAttentionEngine.from_pretrained(
        hf_model,
        recipe=Recipe(promote=1) if is_hybrid else Recipe(),
        tokenizer=counting_tokenizer(hf_model.config.vocab_size),
        store=MemoryStore(1 << 40),
        resident_bytes=0,  # so that a repeated question is recomputed
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    typer.run(main)
