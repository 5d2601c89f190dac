"""Grammars at a server: large ones are refused at once, and failures carry their reason."""

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

# llguidance follows references recursively: a chain of 20,000 overflows the stack, which ends the
# server; one of 2,000 does not.
_MOST_REFERENCES = 1_000


def prepare_request(request: Any, backend: str) -> None:
    """Check the size of a request's grammar, and give vLLM choices in a form without its limit.

    vLLM makes a rule of ``choice`` for the backend guidance, which fails from 2,000 choices on.

    Args:
        request: body of a completion or a chat.
        backend: vLLM's backend for grammars.

    Raises:
        ProtocolError: the grammar is too large, or has too many references. Compiling it would
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
                f"{MOST_CHARACTERS:,}. Offer less at once: retrieve the candidates first, or ask "
                "in several steps"
            )
        if (references := text.count('"$ref"')) > _MOST_REFERENCES:
            raise ProtocolError(
                f"the schema of the answer has {references:,} references ($ref), expected at most "
                f"{_MOST_REFERENCES:,}: write short definitions in place, or ask in several steps"
            )
    if held is not None and held.choice and backend == "guidance":
        request.structured_outputs = replace(held, choice=None, grammar=choice_grammar(held.choice))


def failure(request: Request) -> dict[str, Any] | None:
    """``kv_transfer_params`` with the reason why a request's grammar failed; None if it did not.

    A matcher of llguidance with an error allows the end alone. Without this, vLLM returns such an
    answer as if it were complete.
    """
    held = request.structured_output_request
    matcher = getattr(held and held.grammar, "ll_matcher", None)
    if matcher is None or not matcher.is_error():
        return None
    return {FIELD: {_FAILURE: matcher.get_error().partition("\n")[0]}}


def check_output(output: Any) -> None:
    """Raise the failure that the engine reports with an output.

    Raises:
        GrammarError: the grammar of the answer failed; says why.
    """
    told = output.kv_transfer_params
    told = told.get(FIELD) if isinstance(told, Mapping) else None
    if isinstance(told, Mapping) and _FAILURE in told:
        raise GrammarError(
            f"the grammar of the answer cannot be followed: {told[_FAILURE]}. It is too large or "
            "too complex for this server; use fewer anyOf cases, tools or optional properties"
        )
