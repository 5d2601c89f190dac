"""What a generation is asked for and what it gives back. No torch here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Mode = Literal["block", "full"]
"""``block``: context blocks are looked up and attend to themselves only. ``full``: ordinary causal
attention over the same token ids, nothing reused."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """What one request reused, what it computed, and where the time to its first token went.

    Args:
        hits, misses: context blocks found in the store, and computed now.
        reused_tokens: prompt tokens whose KV came from the store.
        computed_tokens: prompt tokens that were computed: missed blocks and the final block.
        generated_tokens: tokens of the answer.
        fetch_s: looking up blocks and encoding the missed ones.
        assemble_s: giving the blocks their positions.
        prefill_s: from there to the first token: the final block's forward and the choice.
        ttft_s: from the call to the first token, waiting for the model included.
        total_s: from the call to the last token.
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

    @property
    def prompt_tokens(self) -> int:
        return self.reused_tokens + self.computed_tokens


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


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. ``text`` is without control tokens and ends before a stop string."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: ReuseStats


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """New text of a stream; the last chunk, whose text may be empty, carries the whole answer."""

    text: str
    generation: Generation | None = None


# Arguments of transformers' `generate` that would undo what the engine does.
_OWNED = frozenset(
    {
        *("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids"),
        *("past_key_values", "use_cache", "cache_implementation", "num_return_sequences"),
    }
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Greedy unless ``temperature`` is above 0.

    ``extra`` goes to transformers' ``generate`` as it stands and wins over all else.
    """

    max_new_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, found {self.max_new_tokens}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature must not be negative, found {self.temperature}")
        if not all(self.stop):
            raise ValueError(f"stop must be a list of non-empty strings, found {self.stop!r}")
        if owned := _OWNED & self.extra.keys():
            raise ValueError(
                f"{', '.join(sorted(owned))} cannot be given: the engine sets the model's inputs "
                "and cache, and gives one answer to each prompt"
            )


class AnswerText:
    """Turns tokens into text as they come: whole characters only, and nothing past a stop string.

    Args:
        tokenizer: a transformers tokenizer, for ``decode``.
        stop: strings that end the answer and are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # Text is decoded from a window: from `_start`, of which the first `_read` tokens are out.
        self._start = 0
        self._read = 0
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one token; give the text that has become certain, maybe none."""
        if self.stopped:
            return ""
        self._ids.append(token)
        seen = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if now.endswith("\ufffd"):  # a character that is not whole yet
            return ""
        if len(now) > len(seen):  # else a control token, which cannot be the start of a window
            self._start, self._read = self._read, len(self._ids)
        return self._emit(now[len(seen) :], final=False)

    @property
    def num_tokens(self) -> int:
        """Tokens taken, up to the one that completed a stop string."""
        return len(self._ids)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        seen = self._decode(self._ids[self._start : self._read])
        rest = self._decode(self._ids[self._start :])[len(seen) :]
        return self._emit(rest, final=True)

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces would change what was already given out.
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _emit(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        cut = min((at for s in self._stop if (at := text.find(s)) >= 0), default=-1)
        if cut >= 0:
            self.stopped, text, self._held = True, text[:cut], ""
        else:
            keep = 0 if final else self._possible_stop(text)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += text
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string may begin with."""
        longest = max((len(s) for s in self._stop), default=0)
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stop):
                return size
        return 0
