"""How far two ways that are equal in exact arithmetic may differ: relative errors by number type.

Errors of rounding lie far below these, errors of principle near 1. 16-bit types also round cosine
and sine, and their errors add up over layers, so their tolerances are wide.
"""

from __future__ import annotations

import torch

LOGITS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 0.15}
"""Of logits: block mode and the oracle, relay and copy."""

STATES = LOGITS | {torch.float64: 1e-3, torch.float32: 1e-3}
"""Of keys and values at two positions, at which a model rounds its own angles differently."""

WIDEST = max(STATES.values())
"""For states of any other type."""
