"""Measure rates and times for which ``blockattn-rag bench`` has no command.

    python benchmarks/efficiency.py shared --batch-sizes 32 --lengths 2048 --repeats 1
    python benchmarks/efficiency.py ingest --lengths 64,128,512
    python benchmarks/efficiency.py recompute --lengths 1000,2000,4000,8000 --layers 4

``shared``: tokens per second of requests that share a system prompt (RelayAttention). ``ingest``:
tokens per second of encoding blocks. ``recompute``: time to first token by the share of the tokens
that is recomputed. The result is printed as JSON.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor
from transformers import DynamicCache

from blockattn_rag import BlockAttentionEngine, BlockModel, MemoryStore, Recipe
from blockattn_rag.app.cli.output import size as bytes_of
from blockattn_rag.lab.efficiency import machine
from blockattn_rag.lab.efficiency.measure import (
    PATHS,
    OnProgress,
    Turns,
    check_batches,
    check_full_length,
    on_path,
    store_contexts,
)
from blockattn_rag.lab.efficiency.shapes import (
    check_sizes,
    counting_tokenizer,
    random_llama,
    random_prompt,
)
from blockattn_rag.model import EncodeRequest
from blockattn_rag.prompts import BlockPrompt

Measured = Literal["shared", "ingest", "recompute"]
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


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

    Shared: the system prompt is read once per layer and step for the whole batch (relay).
    Unshared: every request has its own copy (copy). Both batches need one forward pass per step.

    Args:
        engine: See ``measure_ttft``. The model must support relay.
        batch_sizes: Numbers of requests per batch.
        system_tokens: Lengths of the shared block.
        context_tokens: Tokens of each request's own block.
        question_tokens: Tokens of each request's final block.
        new_tokens: Tokens generated for each request, at least 2.
        repeats, on_progress: See ``measure_ttft``.

    Returns:
        One row for each length of the system prompt and batch size: ``system_tokens``, ``batch``;
        ``shared_tokens_per_s`` and ``unshared_tokens_per_s`` from request to last token, each with
        minimum and maximum, and their quotient ``gain``; ``decode_gain``, the same quotient for the
        steps after the first token; and ``bytes_ratio``, an upper bound of the gain: the bytes of
        keys and values that attention reads unshared over shared, b (s + c) / (s + b c). These are
        the leading terms of RelayAttention's equation 10.
    """
    check_sizes(context_tokens=context_tokens, question_tokens=question_tokens)
    check_sizes(batch=min(batch_sizes, default=0))
    check_sizes(new_tokens=new_tokens - 1)
    check_batches(engine)
    if not engine.model.supports_relay:
        raise ValueError(
            f"{engine.model.name} cannot share blocks: relay attention is not exact for this model"
        )
    turns = Turns(repeats, len(batch_sizes) * len(system_tokens), on_progress)
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
            row |= turns.measure(ways, "tokens_per_s")
            row["gain"] = row["shared_tokens_per_s"] / row["unshared_tokens_per_s"]
            # The first run of each is a warm-up.
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
    """Tokens per second from request to last token.

    Appends the seconds after the first token to ``decode``.
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
    """Prompts with a shared block and a block of their own, with these numbers of tokens."""
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
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Measure tokens per second of encoding without a store, and of a plain forward pass.

    The plain forward pass is an upper bound: it computes the same number of tokens in rows of the
    mean block length without padding, and fills a KV cache, as encoding does.

    Args:
        model: The model.
        block_tokens: Mean block lengths in tokens. Each gives one row, whose blocks have 0.5 to 1.5
            times as many tokens.
        total_tokens: Approximate number of tokens in one run.
        repeats, on_progress: See ``measure_ttft``.

    Returns:
        One row for each length: ``block_tokens``, ``encode_tokens_per_s`` and
        ``plain_tokens_per_s``, each with minimum and maximum, ``encode_over_plain``, and
        ``bytes_per_token``.
    """
    check_sizes(total_tokens=total_tokens, block_tokens=min(block_tokens, default=0))
    turns = Turns(repeats, len(block_tokens), on_progress)
    rows = []
    for size in block_tokens:
        requests = _requests(model, size, max(1, total_tokens // size))
        encode = partial(_encode_rate, model, requests)
        plain = partial(_plain_rate, model, _plain_rows(requests, size))
        row: dict[str, Any] = {"block_tokens": size}
        row |= turns.measure({"encode": encode, "plain": plain}, "tokens_per_s")
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
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Measure the time to first token with recomputation, and in full mode, in turns.

    Args:
        engine: See ``measure_ttft``. The model must support relay.
        lengths: Context lengths in tokens, without the question.
        shares: Shares of the tokens to recompute. 0 is block mode.
        block_tokens, question_tokens, repeats, on_progress: See ``measure_ttft``.

    Returns:
        One row for each length: ``length``, ``full_s``, and ``over_full`` with the quotient of the
        times by share.
    """
    check_sizes(question_tokens=question_tokens, length=min(lengths, default=0))
    turns = Turns(repeats, len(lengths), on_progress)
    rows = []
    for length in lengths:
        prompt = random_prompt(
            length, block_tokens, question_tokens, engine.model.config.vocab_size
        )
        engine.generate(prompt, max_new_tokens=1)  # stores the blocks

        def ttft_s(prompt: BlockPrompt = prompt, **options: Any) -> float:
            answer = engine.generate(prompt, max_new_tokens=1, do_sample=False, **options)
            return answer.stats.ttft_s

        ways = {str(share): partial(ttft_s, recipe=Recipe(recompute=share)) for share in shares}
        times = turns.measure({"full": partial(ttft_s, mode="full"), **ways})
        ratios = {way: times[f"{way}_s"] / times["full_s"] for way in ways}
        rows.append({"length": length, "full_s": times["full_s"], "over_full": ratios})
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
    """Wait until the accelerator has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def columns(measured: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The table of a result: lists of cells by column name."""
    if measured == "shared":
        forms = {
            "system": ("system_tokens", ","),
            "requests": ("batch", ","),
            "unshared": ("unshared_tokens_per_s", ".1f"),
            "shared": ("shared_tokens_per_s", ".1f"),
            "gain": ("gain", ".2f"),
            "decode gain": ("decode_gain", ".2f"),
            "equation 10": ("bytes_ratio", ".1f"),
        }
        return {head: [format(r[name], form) for r in rows] for head, (name, form) in forms.items()}
    if measured == "recompute":
        shares = {f"{float(one):.0%}": one for one in rows[0]["over_full"]}
        ratios = {
            head: [f"{row['over_full'][share]:.2f}" for row in rows]
            for head, share in shares.items()
        }
        return {"context": [f"{row['length']:,}" for row in rows], **ratios}
    forms = {
        "block": ("block_tokens", ","),
        "encoding": ("encode_tokens_per_s", ".0f"),
        "plain forward": ("plain_tokens_per_s", ".0f"),
        "encoding/plain": ("encode_over_plain", ".2f"),
    }
    cells = {head: [format(r[name], form) for r in rows] for head, (name, form) in forms.items()}
    return {**cells, "stored per token": [bytes_of(r["bytes_per_token"]) for r in rows]}


def main(
    measured: Annotated[Measured, typer.Argument(help="What to measure.")],
    lengths: Annotated[str, typer.Option(help="Tokens of the system prompt, or of a block.")],
    model: Annotated[str, typer.Option(help="Llama shape with random weights.")] = "135m",
    batch_sizes: Annotated[str, typer.Option(help="Requests per batch, for shared.")] = "1,8,32",
    repeats: Annotated[int, typer.Option(help="Timed runs.")] = 3,
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "float32",
    layers: Annotated[int | None, typer.Option(help="Keep only so many layers.")] = None,
) -> None:
    """Measure one rate or time, and print the result as JSON."""
    # The warning about missing block fine-tuning does not matter for random weights.
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    sizes, batches = ([int(one) for one in text.split(",")] for text in (lengths, batch_sizes))
    loaded: Any = random_llama(model, max_tokens=max(sizes) + 256, dtype=dtype)
    if layers is not None:
        loaded.model.layers = loaded.model.layers[:layers]
        loaded.config.num_hidden_layers = layers
    engine: BlockAttentionEngine = BlockAttentionEngine.from_pretrained(
        loaded,
        tokenizer=counting_tokenizer(loaded.config.vocab_size),
        store=MemoryStore(1 << 40),
        resident_bytes=0,
    )
    if measured == "shared":
        rows = measure_shared(engine, batches, system_tokens=sizes, repeats=repeats)
    elif measured == "recompute":
        rows = measure_recompute(engine, sizes, repeats=repeats)
    else:
        rows = measure_ingest(engine.model, sizes, repeats=repeats)
    device = engine.model.device
    found = {"model": model, "dtype": dtype, "device": str(device), "repeats": repeats}
    found["layers"] = loaded.config.num_hidden_layers
    print(json.dumps({**found, "rows": rows, "machine": machine(device)}))


if __name__ == "__main__":
    typer.run(main)
