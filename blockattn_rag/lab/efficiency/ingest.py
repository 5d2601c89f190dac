"""How fast blocks are encoded, against a plain batched forward of as many tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from blockattn_rag.lab.efficiency.timing import OnProgress, Turns, check_sizes
from blockattn_rag.model import BlockModel, EncodeRequest


def measure_ingest(
    model: BlockModel,
    block_tokens: Sequence[int],
    *,
    total_tokens: int = 8192,
    repeats: int = 3,
    on_progress: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Measure tokens per second of encoding, without a store, and of a plain forward.

    The plain forward has batches of as many tokens, rows of the mean block's length, without
    padding, and fills a cache, as encoding must; so its rate is what there is to reach.

    Args:
        model: any.
        block_tokens: mean lengths of blocks, each of which gives a row; the blocks of one row
            have half to one and a half times as many.
        total_tokens: tokens in one run, about.
        repeats, on_progress: as for :func:`measure_ttft`.

    Returns:
        One row for each length: ``block_tokens``, ``encode_tokens_per_s`` and
        ``plain_tokens_per_s`` with their spreads, ``encode_over_plain``, and ``bytes_per_token``.
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
    """Until the accelerator has done what was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
