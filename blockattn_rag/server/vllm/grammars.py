"""Grammars in vLLM: size limits, and failures with their reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockattn_rag.errors import GrammarError, ProtocolError
from blockattn_rag.output.grammar import MOST_CHARACTERS, choice_grammar
from blockattn_rag.server.protocol import FIELD

if TYPE_CHECKING:
    from vllm.v1.request import Request

_FAILURE = "grammar_failure"

# llguidance follows references recursively: a chain of 20,000 overflows the stack and ends the
# server; one of 2,000 does not.
_MOST_REFERENCES = 1_000


def prepare_request(request: Any, backend: str) -> None:
    """Check the size of a request's grammar, and rewrite ``choice`` for the backend guidance.

    vLLM's own grammar for ``choice`` fails from 2,000 choices on.

    Args:
        request: Body of a completion or a chat.
        backend: vLLM's backend for grammars.

    Raises:
        ProtocolError: The grammar is too large, or has too many references. Compiling it would
            block or end the server.
    """
    held = request.structured_outputs
    asked = request.response_format
    values = [] if asked is None else [asked.model_dump_json()]
    if held is not None:
        values += [held.json, held.regex, held.choice, held.grammar, held.structural_tag]
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > MOST_CHARACTERS:
            raise ProtocolError(
                f"the grammar of the answer has {len(text):,} characters, expected at most "
                f"{MOST_CHARACTERS:,}. Offer fewer options: retrieve candidates first, or ask in "
                "several steps"
            )
        if (references := text.count('"$ref"')) > _MOST_REFERENCES:
            raise ProtocolError(
                f"the schema of the answer has {references:,} references ($ref), expected at most "
                f"{_MOST_REFERENCES:,}. Inline short definitions, or ask in several steps"
            )
    if held is not None and held.choice and backend == "guidance":
        request.structured_outputs = replace(held, choice=None, grammar=choice_grammar(held.choice))


def failure(request: Request) -> dict[str, Any] | None:
    """``kv_transfer_params`` with the reason why a request's grammar failed; None if it did not.

    After an error, a matcher of llguidance allows only the end of the answer, which vLLM would
    return as complete.
    """
    held = request.structured_output_request
    matcher = getattr(held and held.grammar, "ll_matcher", None)
    if matcher is None or not matcher.is_error():
        return None
    return {FIELD: {_FAILURE: matcher.get_error().partition("\n")[0]}}


def check_output(output: Any) -> None:
    """Raise GrammarError if the engine reports a failure with an output."""
    params = output.kv_transfer_params
    ours = params.get(FIELD) if isinstance(params, Mapping) else None
    if isinstance(ours, Mapping) and _FAILURE in ours:
        raise GrammarError(
            f"the grammar of the answer cannot be followed: {ours[_FAILURE]}. It is too large or "
            "too complex for this server; use fewer anyOf cases, tools or optional properties"
        )
