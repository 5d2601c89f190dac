"""Answers that are to be JSON, read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blockattn_rag.errors import IncompleteAnswerError
from blockattn_rag.output.grammar import parse_grammar

_CUT = (
    "was cut by its limit; raise max_new_tokens, or retrieve fewer passages if the context window "
    "is full, and bound what the schema leaves open (maxLength, maxItems, maximum)"
)
_REPEATED = (
    "was ended because it repeated itself; give it a schema, change the prompt, or set a "
    "temperature"
)
_ENDED = "ended before it was whole; leave out stop strings that it may hold"


def complete_json(text: str, finish_reason: str | None) -> Any:
    """The JSON value that a whole answer is.

    Args:
        text: the answer.
        finish_reason: why it ended; ``"length"``: it was cut.

    Raises:
        IncompleteAnswerError: it was cut, is no JSON, or is nested too deeply.
    """
    was_cut = finish_reason == "length"
    try:
        value = json.loads(text)
    except RecursionError:
        raise IncompleteAnswerError(
            "an answer that was to be JSON is nested too deeply to be read; bound the depth of the "
            f"schema. Found {_shown(text)}",
            text,
        ) from None
    except ValueError as error:
        raise incomplete(text, finish_reason, str(error)) from error
    if was_cut and type(value) in (int, float):  # of which more digits might have come
        raise incomplete(text, finish_reason)
    return value


def incomplete(text: str, finish_reason: str | None, found: str = "") -> IncompleteAnswerError:
    """The error of an answer that is not whole.

    Args:
        text: the answer.
        finish_reason: why it ended; ``"length"``: it was cut.
        found: what is wrong with it.
    """
    known = {"length": _CUT, "repetition": _REPEATED}
    why = known.get(finish_reason or "", f"{_ENDED} ({found})")
    return IncompleteAnswerError(f"an answer that was to be JSON {why}. Found {_shown(text)}", text)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 200 else f"{text[:100]!r} ... {text[-100:]!r}"


def has_no_thoughts(options: Mapping[str, Any]) -> bool:
    """Whether a grammar leaves an answer no room to think first.

    Args:
        options: of a call, as an engine takes them.

    Raises:
        TypeError, ValueError: they ask for a grammar in no known form.
    """
    grammar = parse_grammar(options.get("response_format"), options.get("structured_outputs"))
    if grammar is None or grammar.kind == "structural_tag":
        return False
    return "</think>" not in grammar.text
