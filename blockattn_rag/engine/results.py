"""Generation results: answers, stream chunks and statistics. Does not import torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from blockattn_rag.output.answers import complete_json

Mode = Literal["block", "full"]
"""``block``: each context block only attends to itself, and is reused. ``full``: ordinary causal
attention over the same token ids, without reuse."""

FinishReason = Literal["stop", "length", "repetition"]
"""``stop``: the answer ended at an end token or stop string, or after the only allowed tool call.
``length``: the answer reached the token limit. ``repetition``: the answer was stopped because it
repeated itself (``model.repetition``)."""


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """Statistics of one request: reused and computed tokens, and time per step.

    Args:
        mode: The request's mode.
        hits: Number of context blocks reused from the store, memory, or earlier in the prompt.
        misses: Number of context blocks computed.
        reused_tokens: Prompt tokens whose KV was reused, from hits or from an earlier prompt with
            the same context (``engine.tails``).
        computed_tokens: Prompt tokens that were computed: missing blocks, the new part of the final
            block, and passage tokens that the recipe recomputes. Each token counts once.
        generated_tokens: Tokens in the answer.
        fetch_s: Seconds to tokenize, look up and encode blocks, and recompute tokens.
        assemble_s: Seconds to assemble blocks into a KV cache.
        prefill_s: Seconds from the end of the assembly to the first token.
        ttft_s: Seconds from the call to the first token, including the wait for the model.
        total_s: Seconds from the call to the last token.
        int8_blocks: Context blocks whose KV is int8 (see ``kv_dtype`` of the engine).
        recipe: The recipe as text (``str(recipe)``). Empty in full mode.
    """

    mode: Mode
    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
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
        """Restore statistics from the output of ``dataclasses.asdict``. Ignores unknown keys."""
        return cls(**{field.name: figures[field.name] for field in fields(cls)})

    @property
    def prompt_tokens(self) -> int:
        return self.reused_tokens + self.computed_tokens

    def __add__(self, other: ReuseStats) -> ReuseStats:
        """Add up the counts and seconds of two requests. Keeps this request's mode and recipe."""
        names = [field.name for field in fields(self) if field.name not in ("mode", "recipe")]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(self, **sums)

    def reuse(self) -> dict[str, int]:
        names = ("hits", "misses", "reused_tokens", "computed_tokens")
        return {name: getattr(self, name) for name in names}


class Clock:
    """Timestamps of one request's steps, from ``time.perf_counter``."""

    def __init__(self, started: float) -> None:
        self.started = self.assembling = self.prefilling = started
        self.first_token: float | None = None

    def note_token(self) -> None:
        if self.first_token is None:
            self.first_token = time.perf_counter()

    def complete(self, stats: ReuseStats, generated_tokens: int) -> ReuseStats:
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


@dataclass(frozen=True, slots=True)
class Generation:
    """Complete answer to a request, with its statistics.

    Args:
        text: Text of the answer up to a stop string, without control tokens.
        token_ids: Token ids of the answer, including an end token or stop string.
        finish_reason: Why the answer ended; see ``FinishReason``.
        stats: Statistics of the request.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: ReuseStats

    def json(self) -> Any:
        """Parse the answer as JSON.

        Raises:
            IncompleteAnswerError: The answer was cut off, or is not JSON.
        """
        return complete_json(self.text, self.finish_reason)


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of a streamed answer.

    Args:
        text: New text. Empty in the last chunk.
        generation: The complete answer. Only set in the last chunk.
        token_ids: New tokens. Their text may follow in later chunks.
    """

    text: str
    generation: Generation | None = None
    token_ids: tuple[int, ...] = ()
