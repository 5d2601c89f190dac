"""Options that contradict what the engine does are refused."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.model.sampling import Sampling


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, found 0"),
        ({"temperature": -1.0}, "temperature must not be negative"),
        ({"stop": ("",)}, "stop must be a list of non-empty strings"),
        ({"extra": {"past_key_values": None}}, "past_key_values cannot be given"),
        ({"extra": {"use_cache": False, "num_return_sequences": 2}}, "num_return_sequences, use"),
    ],
)
def test_bad_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)
