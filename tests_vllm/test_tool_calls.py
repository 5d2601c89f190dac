"""Tool calls through the OpenAI route: required calls follow a grammar, quoted calls are text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from blockattn_rag.server.launch import STRUCTURED_OUTPUTS
from tests.chat_templates import QWEN25
from tests_vllm.reference import Reference
from tests_vllm.server import CHATS, Server, serving

TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "parameters": {
            "type": "object",
            "properties": {"metres": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["metres"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "measure"}}


@pytest.fixture(scope="module")
def server(reference: Reference) -> Iterator[Server]:
    template = reference.folder / "qwen.jinja"
    template.write_text(QWEN25)
    outputs = ("--structured-outputs-config", json.dumps(STRUCTURED_OUTPUTS))
    yield from serving(reference, "tools", *outputs, "--chat-template", str(template))


def chat(reference: Reference, *, has_documents: bool, **fields: Any) -> dict[str, Any]:
    _, *passages, question = reference.case(15).texts
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
    if has_documents:
        body["documents"] = [{"text": text} for text in passages]
    # The penalty ends repeated spaces, which the grammar of calls allows.
    sampling = {"temperature": 0, "max_tokens": 128, "frequency_penalty": 2.0}
    return {**body, "tools": [TOOL], **sampling, **fields}


@pytest.mark.parametrize("has_documents", [True, False])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_required_calls_are_made(
    reference: Reference, server: Server, choice: Any, has_documents: bool
) -> None:
    body = chat(reference, has_documents=has_documents, tool_choice=choice)
    response = server.post(CHATS, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    (only,) = answer["choices"]
    (call,) = only["message"]["tool_calls"]
    assert [*json.loads(call["function"]["arguments"])] == ["metres"]
    assert (call["function"]["name"], only["finish_reason"]) == ("measure", "tool_calls")
    assert not only["message"]["content"]
    assert "token_ids" not in only
    assert answer["blockattn"]["mode"] == ("block" if has_documents else "full")
    events = [*server.events(CHATS, body)]
    choices = [choice for event in events for choice in event["choices"]]
    calls = [call for one in choices for call in one["delta"].get("tool_calls") or ()]
    assert [streamed["function"] for streamed in calls] == [call["function"]]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert [event["blockattn"]["mode"] for event in events if "blockattn" in event] == [
        answer["blockattn"]["mode"]
    ]


def test_optional_calls_do_not_change_text(reference: Reference, server: Server) -> None:
    body = chat(reference, has_documents=True, max_tokens=24)
    answer = server.ask(body, CHATS)
    assert answer.tokens
    assert answer.text
    without = server.ask({**body, "tool_choice": "none"}, CHATS)
    assert without.usage["prompt_tokens"] < answer.usage["prompt_tokens"] or without.text
    deltas = [one["delta"] for event in server.events(CHATS, body) for one in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == answer.text


def test_a_schema_allows_an_object_or_a_call(reference: Reference, server: Server) -> None:
    schema = {"type": "object", "properties": {"tall": {"type": "boolean"}}, "required": ["tall"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = server.post(CHATS, chat(reference, has_documents=True, response_format=form)).json()
    message = answer["choices"][0]["message"]
    assert message["tool_calls"] or "tall" in json.loads(message["content"])


def test_invalid_choice_is_refused(reference: Reference, server: Server) -> None:
    named = {"type": "function", "function": {"name": "other"}}
    message = server.refusal(chat(reference, has_documents=True, tool_choice=named), CHATS)
    assert "does not match any of the specified" in message
