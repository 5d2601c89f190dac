"""Answers that are to be JSON, read."""

from __future__ import annotations

import json
from typing import Any

from blockattn_rag.errors import IncompleteAnswerError

_CUT = (
    "was cut by its limit; raise max_new_tokens, or retrieve fewer passages if the context window "
    "is full, and bound what the schema leaves open (maxLength, maxItems, maximum)"
)
_ENDED = "ended before it was whole; leave out stop strings that it may hold"


def complete_json(text: str, finish_reason: str | None) -> Any:
    """The JSON value that a whole answer is.

    Args:
        text: the answer.
        finish_reason: why it ended; ``"length"``: it was cut.

    Raises:
        IncompleteAnswerError: it was cut, or is no JSON.
    """
    was_cut = finish_reason == "length"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _incomplete(text, _CUT if was_cut else f"{_ENDED} ({error})") from error
    if was_cut and type(value) in (int, float):  # of which more digits might have come
        raise _incomplete(text, _CUT)
    return value


def _incomplete(text: str, why: str) -> IncompleteAnswerError:
    shown = repr(text) if len(text) <= 200 else f"{text[:100]!r} ... {text[-100:]!r}"
    return IncompleteAnswerError(f"an answer that was to be JSON {why}. Found {shown}", text)
