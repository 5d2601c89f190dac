"""RecipeOutline: a recipe's settings, and their text form. Does not import torch.

The text form lists the settings that need no fitting, joined by ``+``::

    none                  block mode as published
    head                  a sink; see ``prompts.sinks``
    recompute:0.1         share of the passages' tokens to recompute for each question
    promote:1             number of passages at the end of a prompt to compute with the question
    head+recompute:0.1    several settings
    fast                  the best settings that cost nothing per answer: the same as ``head:4``
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from blockattn_rag.prompts.sinks import NO_SINK, is_sink

STOCK = "head+recompute:0.1"
"""Settings that ``"auto"`` uses for a stock model without a recipe. They need no fitting.
docs/quality.md compares them with other settings."""

STOCK_SOURCE = "stock model"
"""``Recipe.source`` of a recipe with the settings ``STOCK``."""

FAST, FREE_SINK = "fast", "head:4"
"""Name of the best settings without a cost per answer, and their sink."""

TEXT_FORMS = (
    "settings such as 'none', 'fast' or 'head+recompute:0.1' (a sink, 'promote:N' and "
    "'recompute:SHARE', joined by '+')"
)
"""Description of the text form, for messages."""


@dataclass(frozen=True, slots=True)
class RecipeOutline:
    """Settings of a ``Recipe``, with a digest in place of the adapter. For the same model, recipes
    with equal outlines lead to equal answers."""

    sink: str
    adapter: str = ""  # Digest. Empty: no adapter.
    promote: int = 0
    recompute: float = 0.0
    positions: str = "reordered"

    def __post_init__(self) -> None:
        # Equal shares must have equal digests: 1 and 1.0, -0.0 and 0.0.
        object.__setattr__(self, "recompute", float(self.recompute) + 0.0)

    @property
    def encoding(self) -> tuple[str, str]:
        """Sink and adapter digest. Recipes with equal encodings share stored blocks."""
        return self.sink, self.adapter

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    def __str__(self) -> str:
        """Return the text form, plus the adapter and the positions for messages."""
        parts = [self.sink] if self.sink != NO_SINK else []
        parts += [f"adapter:{self.adapter[:6]}"] if self.adapter else []
        parts += [f"promote:{self.promote}"] if self.promote else []
        parts += [f"recompute:{self.recompute:g}"] if self.recompute else []
        parts += [f"positions:{self.positions}"] if self.positions != "reordered" else []
        return "+".join(parts) or NO_SINK

    @classmethod
    def parsed(cls, text: str) -> RecipeOutline | None:
        """Parse the text form. Returns None for any other text, such as a folder's path."""
        sink, settings = "", dict[str, Any]()
        for part in (FREE_SINK if text == FAST else text).split("+"):
            name, _, value = part.partition(":")
            try:
                if is_sink(part) and not sink:
                    sink = part
                elif name in _TYPES and name not in settings:
                    settings[name] = _TYPES[name](value)
                else:
                    return None
            except ValueError:
                return None
        return cls(sink or NO_SINK, **settings)


_TYPES: dict[str, type[int] | type[float]] = {"promote": int, "recompute": float}
