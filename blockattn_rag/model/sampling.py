"""Sampling options, which the engine passes to transformers' ``generate``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from blockattn_rag.output.grammar import Grammar

# Arguments of transformers' `generate` that are reserved for the engine.
_OWNED = frozenset(
    {
        *("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids"),
        *("past_key_values", "use_cache", "cache_implementation", "num_return_sequences"),
    }
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options for an answer. Decoding is greedy unless ``temperature`` is above 0.

    ``extra`` is passed to transformers' ``generate`` unchanged, and overrides everything except the
    grammar. Comparisons ignore ``grammar``, because answers in a batch may have different grammars.
    Raises ``ValueError`` for invalid options.
    """

    max_new_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not _is_whole(self.max_new_tokens, 1):
            raise _refusal("max_new_tokens", "an integer of at least 1", self.max_new_tokens)
        if self.temperature is not None and not _is_number(self.temperature, math.inf):
            raise _refusal("temperature", "a number of at least 0, or None", self.temperature)
        if self.top_p is not None and not _is_number(self.top_p, 1):
            raise _refusal("top_p", "a number from 0 to 1, or None", self.top_p)
        if self.top_k is not None and not _is_whole(self.top_k, 0):
            raise _refusal("top_k", "an integer of at least 0, or None", self.top_k)
        if self.seed is not None and not (_is_whole(self.seed, -(1 << 63)) and self.seed < 1 << 64):
            raise _refusal("seed", "a 64-bit integer, or None", self.seed)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise _refusal("stop", "a list of non-empty strings", self.stop)
        if owned := _OWNED & self.extra.keys():
            raise ValueError(
                f"Cannot set {', '.join(sorted(owned))}: the engine sets the model's inputs and "
                "cache, and generates one answer per prompt"
            )


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= least


def _is_number(value: Any, most: float) -> bool:
    is_real = type(value) is not bool and isinstance(value, Real)
    return is_real and 0 <= float(value) <= most and math.isfinite(value)


def _refusal(name: str, expected: str, found: object) -> ValueError:
    return ValueError(f"Expected {name} to be {expected}; found {found!r}")
