"""What client and server say at our own routes goes there and back, and nothing else passes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.endpoint import EncodeAnswer, EncodeBody, ServerInfo

INFO = ServerInfo("a" * 64, "b" * 64, "head:4", True, ("llama", "other"), 4096, "tenant", True)
BODY = EncodeBody(((1, 2), (3,)), "llama", opens_prompt=True, private=True, only_look=True)
ANSWER = EncodeAnswer(("found", "encoded", "missing"), 12)


@pytest.mark.parametrize(
    "said", [INFO, BODY, ANSWER, EncodeBody(((1,),)), EncodeAnswer(("found",))]
)
def test_what_is_said_goes_through_json_and_back(said: Any) -> None:
    assert type(said).from_dict(json.loads(json.dumps(said.to_dict()))) == said


def test_what_is_not_asked_for_is_left_out() -> None:
    assert EncodeBody(((1, 2),)).to_dict() == {"blocks": [[1, 2]]}


@pytest.mark.parametrize(
    ("said", "field", "value", "message"),
    [
        (INFO, "v", 2, "found version 2 of the protocol, expected 1"),
        (INFO, "fingerprint", "a", "fingerprint must be 64 hex digits, found 'a'"),
        (INFO, "models", [], "models must have 1 to 256 items, found 0"),
        (INFO, "max_tokens", True, "max_tokens must be a whole number"),
        (INFO, "read_only", 1, "read_only must be true or false, found 1"),
        (INFO, "namespace", "../a", "a namespace is named by"),
        (INFO, "more", 1, "found the unknown field 'more'"),
        (BODY, "blocks", [], "blocks must have 1 to 256 items, found 0"),
        (BODY, "blocks", [[]], r"blocks\[0\] must have 1 to"),
        (BODY, "blocks", [[1, True]], r"blocks\[0\] must be a whole number"),
        (BODY, "blocks", [[-1]], r"blocks\[0\] must be a whole number"),
        (BODY, "only_look", "yes", "only_look must be true or false"),
        (BODY, "path", "/etc", "found the unknown field 'path'"),
        (ANSWER, "blocks", ["there"], "blocks must be one of found, encoded, missing"),
        (ANSWER, "stored_bytes", -1, "stored_bytes must be a whole number"),
    ],
)
def test_what_is_not_of_the_protocol_is_refused(
    said: Any, field: str, value: object, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        type(said).from_dict({**said.to_dict(), field: value})
    if field not in ("path", "more", "v"):
        told = said.to_dict()
        del told[field]
        optional = isinstance(said, EncodeBody) and field != "blocks"
        if not optional:
            with pytest.raises(ProtocolError, match=f"found no field '{field}'"):
                type(said).from_dict(told)
