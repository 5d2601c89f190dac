"""Invalid sampling options, and options that conflict with the engine, are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from blockattn_rag.model.sampling import Sampling


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "Expected max_new_tokens to be an integer of at least 1; found 0"),
        *(({"max_new_tokens": n}, "to be an integer") for n in ("5", 2.5, True, None)),
        *(({"temperature": t}, "temperature to be a number") for t in (-1.0, "x", math.inf)),
        ({"temperature": math.nan}, "temperature to be a number of at least 0"),
        *(({"top_p": p}, "top_p to be a number from 0 to 1") for p in (1.1, -0.1, "x")),
        *(({"top_k": k}, "top_k to be an integer of at least 0") for k in (-1, 1.5, "x")),
        *(({"seed": s}, "seed to be a 64-bit integer") for s in ("a", 1.0, 1 << 64)),
        *(({"stop": s}, "stop to be a list of non-empty strings") for s in ((1,), ("a", None))),
        ({"stop": ("",)}, "stop to be a list of non-empty strings"),
        ({"extra": {"past_key_values": None}}, "Cannot set past_key_values: "),
        ({"extra": {"use_cache": False, "num_return_sequences": 2}}, "num_return_sequences, use"),
    ],
)
def test_invalid_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)
