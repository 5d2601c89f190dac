"""Promotion at a server: the passages that the question attends to most move into the final block.

The server chooses them and changes the prompt; the client repeats the change to check the answer.

Importing this module does not load torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import NamedTuple

from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.protocol import BlockPlan
from blockattn_rag.server.served_blocks import ServedBlocks


class Promotion(NamedTuple):
    """A prompt after promotion.

    Args:
        token_ids: Token ids of the prompt.
        lengths: Tokens of each context block that stays.
        stay: Index of each of these blocks in the prompt before.
    """

    token_ids: list[int]
    lengths: tuple[int, ...]
    stay: tuple[int, ...]


def promote(
    token_ids: Sequence[int],
    lengths: Sequence[int],
    promoted: Sequence[int],
    prefix_ids: Sequence[int],
) -> Promotion:
    """Move blocks of a prompt to the start of its final block, like an engine in process.

    Args:
        token_ids: Token ids of the prompt.
        lengths: Tokens of each context block.
        promoted: Indices of the blocks to move, in their new order.
        prefix_ids: Token ids that every prompt starts with, such as BOS. If the first block moves,
            they move to the block that takes its place.
    """
    tokens = iter(token_ids)
    blocks = [[*islice(tokens, length)] for length in lengths]
    stay = tuple(place for place in range(len(blocks)) if place not in promoted)
    order = [*stay, *promoted]
    if order and order[0] != 0:
        first, new_first, prefix = blocks[0], blocks[order[0]], [*prefix_ids]
        if first[: len(prefix)] == prefix:
            del first[: len(prefix)]
        if new_first[: len(prefix)] != prefix:
            new_first[:0] = prefix
    new_ids = [*chain.from_iterable(blocks[place] for place in order), *tokens]
    return Promotion(new_ids, tuple(len(blocks[place]) for place in stay), stay)


def reuse_of(
    served: ServedBlocks,
    token_ids: Sequence[int],
    plan: BlockPlan,
    promoted: int,
    prefix_ids: Sequence[int],
) -> dict[str, int]:
    """Counts of ``ReuseStats`` for an answer in block mode.

    Args:
        served: The server's report.
        token_ids, plan: Prompt of the request.
        promoted: Number of passages that the server's recipe promotes.
        prefix_ids: See ``promote``.

    Raises:
        ProtocolError: The answer did not use all context blocks, or promoted other ones.
    """
    expected = min(promoted, len(plan.passages))
    if len(served.promoted) != expected or not {*served.promoted} <= {*plan.passages}:
        raise ProtocolError(
            f"the server promoted the blocks {list(served.promoted)}, expected {expected} of the "
            f"passages {list(plan.passages)}"
        )
    new = promote(token_ids, plan.lengths, served.promoted, prefix_ids)
    served.check_complete(new.lengths)
    question, context = len(token_ids) - plan.context_tokens, sum(new.lengths)
    final = len(new.token_ids) - context
    choosing = question if served.promoted else 0
    encoded_tokens = served.encoded_tokens + served.dropped_tokens
    return {
        "hits": served.blocks - served.encoded,
        "misses": served.encoded + served.dropped,
        "reused_tokens": context - served.encoded_tokens,
        "computed_tokens": encoded_tokens + final + choosing,
        "promoted_tokens": final - question + choosing,
    }
