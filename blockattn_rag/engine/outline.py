"""RecipeOutline: what identifies a recipe, in a form that fits into a message.

Importing this module does not load torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RecipeOutline:
    """A recipe with the digest of its adapter instead of the adapter. Equal outlines give equal
    answers of one model.

    Args:
        sink, promote, recompute, positions: See ``Recipe``.
        adapter: Digest of the adapter. Empty: no adapter.
    """

    sink: str
    adapter: str = ""
    promote: int = 0
    recompute: float = 0.0
    positions: str = "reordered"

    def __post_init__(self) -> None:
        # Equal shares have equal digests: 1 and 1.0, -0.0 and 0.0.
        object.__setattr__(self, "recompute", float(self.recompute) + 0.0)

    @property
    def encoding(self) -> tuple[str, str]:
        """The sink and the adapter's digest. Recipes with equal encodings share stored blocks."""
        return self.sink, self.adapter

    @property
    def digest(self) -> str:
        """sha256 of all fields: 64 hex digits."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    def __str__(self) -> str:
        parts = [self.sink] if self.sink != "none" else []
        parts += [f"adapter {self.adapter[:6]}"] if self.adapter else []
        parts += [f"promote {self.promote}"] if self.promote else []
        parts += [f"recompute {100 * self.recompute:g} %"] if self.recompute else []
        parts += [f"{self.positions} positions"] if self.positions != "reordered" else []
        return " + ".join(parts) or "none"
