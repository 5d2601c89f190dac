"""Report on the context blocks of an answer, in its ``kv_transfer_params``, and promotion.

The server moves the passages that the question attends to most into the final block, and changes
the prompt. The client repeats the change to check the report.

Importing this module does not load torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.protocol import FIELD, MOST_BLOCKS, VERSION, BlockPlan
from blockattn_rag.server.validation import STRICT, Count, check_version, parse, shown


@dataclass(config=STRICT, frozen=True, slots=True)
class ServedBlocks:
    """Report on the context blocks of a request in block mode: loaded, cached or encoded.

    Args:
        blocks: Number of context blocks.
        loaded_tokens: Context tokens loaded from a store.
        local_tokens: Context tokens found in the engine's own cache.
        encoded: Blocks encoded for this request, because no store had them.
        encoded_tokens: Tokens of these encoded blocks.
        fetch_s: Seconds to load the blocks.
        int8_blocks: Blocks loaded in int8.
        promoted: Indices of the passages that moved into the final block, the most attended last.
            They are not among ``blocks``.
        dropped, dropped_tokens: Blocks that were encoded for this request before they moved, and
            their tokens. They are not among ``encoded``.
        cut_short: Whether a stop string ended the answer. The engine then reports nothing, so
            ``loaded_tokens``, ``local_tokens``, ``fetch_s`` and ``int8_blocks`` are unknown and 0.

    Raises:
        ValueError: A field is invalid.
    """

    blocks: Count
    loaded_tokens: Count
    local_tokens: Count
    encoded: Count = 0
    encoded_tokens: Count = 0
    fetch_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0
    int8_blocks: Count = 0
    promoted: Annotated[tuple[Count, ...], Field(max_length=MOST_BLOCKS)] = ()
    dropped: Count = 0
    dropped_tokens: Count = 0
    cut_short: StrictBool = False

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.cut_short and (
            self.loaded_tokens or self.local_tokens or self.fetch_s or self.int8_blocks
        ):
            raise ValueError(
                "found cut_short and counts that it makes unknown: loaded_tokens, local_tokens, "
                "fetch_s and int8_blocks must be 0"
            )
        if self.encoded_tokens < self.encoded or (self.encoded_tokens and not self.encoded):
            raise ValueError(
                f"found {self.encoded} encoded blocks of {self.encoded_tokens} tokens together, "
                "which disagree"
            )
        return self

    def check_complete(self, lengths: tuple[int, ...]) -> None:
        """Check that an answer used all context blocks of a prompt, which have these lengths.

        Raises:
            ProtocolError: A block was not used, or the counts are inconsistent.
        """
        expected = sum(lengths)
        tokens = expected if self.cut_short else self.loaded_tokens + self.local_tokens
        if (self.blocks, tokens) != (len(lengths), expected):
            raise ProtocolError(
                f"the server answered from {self.blocks} blocks of {tokens} tokens, expected "
                f"{len(lengths)} of {expected}"
            )
        if self.encoded > self.blocks or self.encoded_tokens > tokens:
            raise ProtocolError(
                f"the server reports {self.encoded} of {self.blocks} blocks as encoded, and "
                f"{self.encoded_tokens} of {tokens} tokens"
            )

    def to_dict(self) -> dict[str, Any]:
        """``kv_transfer_params`` of the answer."""
        return {FIELD: {"v": VERSION, "mode": "block", **asdict(self)}}

    @classmethod
    def from_dict(cls, kv_transfer_params: Mapping[str, Any] | None) -> ServedBlocks:
        """Parse an answer's ``kv_transfer_params``, ignoring fields of other connectors.

        Raises:
            ProtocolError: The answer was not computed in block mode, or has another version.
        """
        params = kv_transfer_params
        if not isinstance(params, Mapping) or FIELD not in params:
            raise ProtocolError(
                f"found kv_transfer_params {shown(params)} in the server's answer, expected the "
                f"field {FIELD!r}: it was not computed in block mode. Configure this package's "
                "connector on the server"
            )
        fields = check_version(params[FIELD], "v", VERSION, FIELD)
        if (mode := fields.pop("mode", None)) != "block":
            raise ProtocolError(f"found mode {shown(mode)} in {FIELD}, expected 'block'")
        return parse(cls, fields, FIELD)


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
