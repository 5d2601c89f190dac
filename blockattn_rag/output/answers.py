"""JSON answers, and errors for incomplete ones."""

from __future__ import annotations

import json
from typing import Any

from blockattn_rag.errors import IncompleteAnswerError

_REASONS = {
    "length": "was cut by its limit; raise max_new_tokens, or retrieve fewer passages if the "
    "context window is full, and bound what the schema leaves open (maxLength, maxItems, maximum)",
    "repetition": "was ended because it repeated itself; give it a schema, change the prompt, or "
    "set a temperature",
}


def complete_json(text: str, finish_reason: str | None) -> Any:
    """The value of an answer that is complete JSON.

    Args:
        text: The answer.
        finish_reason: Why it ended. ``"length"``: it was cut.

    Raises:
        IncompleteAnswerError: The answer was cut, is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise IncompleteAnswerError(
            "a JSON answer is nested too deeply to be read; limit the depth of the schema. Found "
            f"{_shown(text)}",
            text,
        ) from None
    except ValueError as error:
        raise incomplete(text, finish_reason, str(error)) from error
    if finish_reason == "length" and type(value) in (int, float):  # digits may be missing
        raise incomplete(text, finish_reason)
    return value


def incomplete(text: str, finish_reason: str | None, found: str = "") -> IncompleteAnswerError:
    """The error for a JSON answer that is incomplete.

    Args:
        text: The answer.
        finish_reason: Why it ended.
        found: What is wrong with it.
    """
    ended = f"ended before it was complete; leave out stop strings that it may contain ({found})"
    why = _REASONS.get(finish_reason or "", ended)
    return IncompleteAnswerError(f"a JSON answer {why}. Found {_shown(text)}", text)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 200 else f"{text[:100]!r} ... {text[-100:]!r}"
