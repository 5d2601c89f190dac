"""JSON answers, and errors for incomplete ones."""

from __future__ import annotations

import json
from typing import Any

from blockattn_rag.errors import IncompleteAnswerError

_REASONS = {
    "length": "was cut off at its token limit; raise max_new_tokens (or retrieve fewer passages, "
    "if the context window is full), or limit the schema with maxLength, maxItems and maximum",
    "repetition": "was stopped because it repeated itself; pass a schema, change the prompt, or "
    "set a temperature",
}


def complete_json(text: str, finish_reason: str | None) -> Any:
    """Parse an answer that must be complete JSON.

    Args:
        text: The answer.
        finish_reason: Why the answer ended. ``"length"``: it was cut off.

    Raises:
        IncompleteAnswerError: The answer was cut off, is not JSON, or is nested too deeply.
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
    """Create the error for an incomplete JSON answer.

    Args:
        text: The answer.
        finish_reason: Why the answer ended.
        found: Error of the JSON parser.
    """
    ended = f"ended before it was complete; remove stop strings that it may contain ({found})"
    why = _REASONS.get(finish_reason or "", ended)
    return IncompleteAnswerError(f"a JSON answer {why}. Found {_shown(text)}", text)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 200 else f"{text[:100]!r} ... {text[-100:]!r}"
