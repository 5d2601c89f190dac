"""Ingestion through a server: batches of blocks, and their outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from blockattn_rag.engine.ingest import EncodeStats, progress
from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.client.http import background
from blockattn_rag.server.protocol import EncodeAnswer, EncodeBody

AT_ONCE = 8
"""Concurrent requests. The server batches their blocks."""

BATCH_TOKENS = 8192
_BATCH_BLOCKS = 32

Encode = Callable[[EncodeBody], Coroutine[Any, Any, EncodeAnswer]]


class ToEncode(NamedTuple):
    """Token ids of a block to encode, whether the block is private, and its index entry."""

    ids: Sequence[int]
    private: bool = False
    entry: str = ""


def batches(
    blocks: Sequence[ToEncode], *, as_prompt: bool, batch_tokens: int | None
) -> Iterator[EncodeBody]:
    """Group distinct blocks into request bodies.

    Args:
        as_prompt: Whether the first block opens a prompt, and so is encoded without the sink.
        batch_tokens: Maximum tokens of a request. A longer block gets its own request.
    """
    if as_prompt and blocks:
        yield EncodeBody((tuple(blocks[0].ids),), opens_prompt=True, private=blocks[0].private)
    most = batch_tokens or BATCH_TOKENS
    for private in (False, True):
        batch: dict[tuple[int, ...], str] = {}
        same = {tuple(one.ids): one.entry for one in blocks[as_prompt:] if one.private == private}
        for ids, entry in same.items():
            if batch and (len(batch) == _BATCH_BLOCKS or sum(map(len, batch)) + len(ids) > most):
                yield _body(batch, private)
                batch = {}
            batch[ids] = entry
        if batch:
            yield _body(batch, private)


def _body(batch: Mapping[tuple[int, ...], str], private: bool) -> EncodeBody:
    index = tuple(batch.values())
    return EncodeBody(tuple(batch), private=private, index=index if any(index) else ())


def precompute(
    encode: Encode,
    bodies: Sequence[EncodeBody],
    *,
    show_progress: bool,
    on_progress: Callable[[int, int], None] | None,
) -> EncodeStats:
    """Encode missing blocks with concurrent requests.

    The blocks of a request are stored when it is answered, so an interrupted run can be repeated
    and continues where it stopped.

    Raises:
        ServingError: A request failed. No further requests are sent.
    """
    started = time.perf_counter()
    total, stats = sum(map(_num_tokens, bodies)), EncodeStats()
    waiting, running = iter(bodies), dict[Future[EncodeAnswer], EncodeBody]()
    with progress(total, 0, show_progress, on_progress) as report:
        try:
            while True:
                for body in islice(waiting, AT_ONCE - len(running)):
                    running[background.start(encode(body))] = body
                if not running:
                    break
                for answer in wait(running, return_when=FIRST_COMPLETED).done:
                    body = running.pop(answer)
                    stats = _with(stats, body, answer.result())
                    report(_num_tokens(body))
        finally:
            for answer in running:  # after an error or an interrupt
                answer.cancel()
    return replace(stats, seconds=time.perf_counter() - started)


def _num_tokens(body: EncodeBody) -> int:
    return sum(map(len, body.blocks))


def _with(stats: EncodeStats, body: EncodeBody, answer: EncodeAnswer) -> EncodeStats:
    """Add an answer to the stats."""
    lengths = outcome_lengths(body, answer)
    return replace(
        stats,
        computed=stats.computed + len(lengths["encoded"]),
        reused=stats.reused + len(lengths["found"]),
        computed_tokens=stats.computed_tokens + sum(lengths["encoded"]),
        stored_bytes=stats.stored_bytes + answer.stored_bytes,
    )


def outcome_lengths(body: EncodeBody, answer: EncodeAnswer) -> dict[str, list[int]]:
    """Token counts of blocks by outcome.

    Raises:
        ProtocolError: The answer does not match the request.
    """
    if len(answer.blocks) != len(body.blocks):
        raise ProtocolError(
            f"the server answered for {len(answer.blocks)} blocks, expected {len(body.blocks)}"
        )
    lengths: dict[str, list[int]] = {"found": [], "encoded": [], "missing": []}
    for outcome, ids in zip(answer.blocks, body.blocks, strict=True):
        lengths[outcome].append(len(ids))
    if lengths["encoded" if body.only_look else "missing"]:
        raise ProtocolError(
            "the server encoded blocks that it should only look up"
            if body.only_look
            else "the server did not encode all blocks"
        )
    return lengths
