"""What a generation gives back. No torch here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from blockattn_rag.output.answers import complete_json

Mode = Literal["block", "full"]
"""``block``: context blocks are looked up and attend to themselves only. ``full``: ordinary causal
attention over the same token ids, nothing reused."""

FinishReason = Literal["stop", "length", "repetition"]
"""``stop``: an end token, a stop string, or the only call of a tool that was allowed came.
``length``: the answer was cut. ``repetition``: the answer, or a JSON string in it, was ended
because it repeated itself (``model.repetition``), or it made the same call of a tool twice in a
row."""


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """What one request reused, what it computed, and where the time to its first token went.

    Args:
        hits, misses: context blocks found in the store, and computed now.
        reused_tokens: prompt tokens whose KV came from the store, or from an earlier answer of the
            same conversation (``engine.tails``).
        computed_tokens: prompt tokens that were computed: missed blocks, and what is new of the
            final block.
        promoted_tokens: of these, what promotion cost: promoted passages, and the question once
            more to choose them.
        generated_tokens: tokens of the answer.
        fetch_s: looking up blocks and encoding the missed ones.
        assemble_s: giving the blocks their positions.
        prefill_s: from there to the first token: the final block's forward and the choice.
        ttft_s: from the call to the first token, waiting for the model included.
        total_s: from the call to the last token.
        int8_blocks: context blocks, found or computed, whose keys and values are in int8 (see
            ``kv_dtype`` of the engine).
        recipe: what block mode ran with, as short text; empty in full mode.
    """

    mode: Mode
    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    promoted_tokens: int = 0
    generated_tokens: int = 0
    fetch_s: float = 0.0
    assemble_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    int8_blocks: int = 0
    recipe: str = ""

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> ReuseStats:
        """The figures whose ``asdict`` this is; other keys are passed over."""
        return cls(**{one.name: figures[one.name] for one in fields(cls)})

    @property
    def prompt_tokens(self) -> int:
        return self.reused_tokens + self.computed_tokens

    def __add__(self, other: ReuseStats) -> ReuseStats:
        """The figures of both requests together: counts and seconds added, the rest kept."""
        names = [one.name for one in fields(self) if one.name not in ("mode", "recipe")]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(self, **sums)

    def reuse(self) -> dict[str, int]:
        """Blocks and prompt tokens, found and computed, as fields of a JSON object; the promoted
        tokens are among the computed ones."""
        names = ("hits", "misses", "reused_tokens", "computed_tokens", "promoted_tokens")
        return {name: getattr(self, name) for name in names}


class Clock:
    """When the steps of one request happened, in seconds of ``time.perf_counter``."""

    def __init__(self, started: float) -> None:
        self.started = self.assembling = self.prefilling = started
        self.first_token: float | None = None

    def note_token(self) -> None:
        if self.first_token is None:
            self.first_token = time.perf_counter()

    def complete(self, stats: ReuseStats, generated_tokens: int) -> ReuseStats:
        """The figures so far with those of the answer, which ends now."""
        now = time.perf_counter()
        first = self.first_token or now
        return replace(
            stats,
            generated_tokens=generated_tokens,
            assemble_s=self.prefilling - self.assembling,
            prefill_s=first - self.prefilling,
            ttft_s=first - self.started,
            total_s=now - self.started,
        )


Marks = tuple[tuple[int, int], ...]
"""Where control tokens are in a text: index of the first character, and behind the last. Characters
that spell a control token, but come from ordinary tokens, are not among them."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. ``text`` is without control tokens and ends before a stop string.

    ``marks``: where the control tokens are that the call keeps in the text (``keep_tokens``).
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: ReuseStats
    marks: Marks = ()

    def json(self) -> Any:
        """The JSON value that the answer is, where a grammar made it one.

        Raises:
            IncompleteAnswerError: the answer was cut, or is none.
        """
        return complete_json(self.text, self.finish_reason)


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """New text of a stream; the last chunk, whose text may be empty, carries the whole answer.

    ``marks`` are those of the chunk's text. No kept control token is split between chunks.
    """

    text: str
    generation: Generation | None = None
    marks: Marks = ()


def marks_at_end(piece: Generation | GenerationChunk, end: str) -> Marks:
    """The marks of the last characters of an answer or stream, as spans of these.

    Args:
        piece: an answer, or the latest chunk of a stream.
        end: the characters; they may begin before the chunk.
    """
    shift = len(end) - len(piece.text)
    return tuple((a + shift, b + shift) for a, b in piece.marks if a + shift >= 0)
