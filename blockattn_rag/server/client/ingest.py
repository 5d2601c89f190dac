"""Ingestion through a server: which blocks are sent together, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.client.background import background
from blockattn_rag.server.endpoint import EncodeAnswer, EncodeBody

AT_ONCE = 8
"""Requests under way at a time. The server computes their blocks in batches of its own."""

BATCH_TOKENS = 8192
_BATCH_BLOCKS = 32

Encode = Callable[[EncodeBody], Coroutine[Any, Any, EncodeAnswer]]


class ToEncode(NamedTuple):
    """A block's token ids, and whether private blocks alone are to find it."""

    ids: Sequence[int]
    private: bool = False


def batches(
    blocks: Sequence[ToEncode], *, as_prompt: bool, batch_tokens: int | None
) -> Iterator[EncodeBody]:
    """Distinct blocks as bodies of requests.

    Args:
        as_prompt: the first block opens a prompt, and is another one than the same ids elsewhere.
        batch_tokens: of one request; a block of more tokens has one of its own.
    """
    if as_prompt and blocks:
        yield EncodeBody((tuple(blocks[0].ids),), opens_prompt=True, private=blocks[0].private)
    most = batch_tokens or BATCH_TOKENS
    for private in (False, True):
        batch: list[tuple[int, ...]] = []
        same = (tuple(one.ids) for one in blocks[as_prompt:] if one.private == private)
        for ids in dict.fromkeys(same):
            if batch and (len(batch) == _BATCH_BLOCKS or sum(map(len, batch)) + len(ids) > most):
                yield EncodeBody(tuple(batch), private=private)
                batch = []
            batch.append(ids)
        if batch:
            yield EncodeBody(tuple(batch), private=private)


def precompute(
    encode: Encode,
    bodies: Sequence[EncodeBody],
    *,
    show_progress: bool,
    on_progress: Callable[[int, int], None] | None,
) -> EncodeStats:
    """Have blocks encoded that are not stored, several requests at a time.

    What a request encoded is stored when its answer comes: a run that was interrupted goes on where
    it stopped.

    Raises:
        ServingError: a request failed; those that had not begun are not made.
    """
    started = time.perf_counter()
    total, done, stats = sum(len(body.blocks) for body in bodies), 0, EncodeStats()
    waiting, running = iter(bodies), dict[Future[EncodeAnswer], EncodeBody]()
    with tqdm(total=total, desc="Encoding blocks") if show_progress else nullcontext() as bar:
        try:
            while True:
                for body in islice(waiting, AT_ONCE - len(running)):
                    running[background.start(encode(body))] = body
                if not running:
                    break
                for answer in wait(running, return_when=FIRST_COMPLETED).done:
                    body = running.pop(answer)
                    stats = _with(stats, body, answer.result())
                    done += len(body.blocks)
                    if bar is not None:
                        bar.update(len(body.blocks))
                    if on_progress is not None:
                        on_progress(done, total)
        finally:
            for answer in running:  # beside one that failed, or an interrupt
                answer.cancel()
    return replace(stats, seconds=time.perf_counter() - started)


def _with(stats: EncodeStats, body: EncodeBody, answer: EncodeAnswer) -> EncodeStats:
    """The figures with those of one more answer."""
    lengths = outcome_lengths(body, answer)
    return replace(
        stats,
        computed=stats.computed + len(lengths["encoded"]),
        reused=stats.reused + len(lengths["found"]),
        computed_tokens=stats.computed_tokens + sum(lengths["encoded"]),
        stored_bytes=stats.stored_bytes + answer.stored_bytes,
    )


def outcome_lengths(body: EncodeBody, answer: EncodeAnswer) -> dict[str, list[int]]:
    """Tokens of the blocks that met each outcome.

    Raises:
        ProtocolError: the answer is not of these blocks, or leaves out what it was asked to do.
    """
    if len(answer.blocks) != len(body.blocks):
        raise ProtocolError(
            f"the server told of {len(answer.blocks)} blocks, asked for {len(body.blocks)}"
        )
    lengths: dict[str, list[int]] = {"found": [], "encoded": [], "missing": []}
    for outcome, ids in zip(answer.blocks, body.blocks, strict=True):
        lengths[outcome].append(len(ids))
    if lengths["encoded" if body.only_look else "missing"]:
        raise ProtocolError(
            "the server encoded blocks that it was asked to look for"
            if body.only_look
            else "the server left blocks missing that it was asked to encode"
        )
    return lengths
