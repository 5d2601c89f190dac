"""How tokens are chosen: the arguments of transformers' ``generate`` that the engine hands on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
