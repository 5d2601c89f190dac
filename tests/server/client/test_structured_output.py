"""Objects of a schema from a model behind a server, through both frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.errors import IncompleteAnswerError
from blockattn_rag.langchain import ChatBlockAttention
from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.server.client import RemoteEngine
from blockattn_rag.server.protocol import COMPLETIONS
from tests.scripted import tool_model
from tests.server.client.fake_server import FakeServer


class Tower(BaseModel):
    """A tower."""

    höhe: int = Field(ge=0, le=99)


ASKED = [("human", "How tall?")]
NAMED = {"name": "Tower", "schema": Tower.model_json_schema()}
BY_SCHEMA = {"type": "json_schema", "json_schema": NAMED}


def asked_of(server: FakeServer) -> list[Any]:
    """What the server was asked for answers."""
    bodies = [*server.bodies("/v1/completions"), *server.bodies(COMPLETIONS)]
    return [
        {name: body[name] for name in ("response_format", "structured_outputs") if name in body}
        for body in bodies
    ]


@pytest.fixture
def behind() -> Iterator[FakeServer]:
    """A server with a model whose template knows tools."""
    server = FakeServer(tool_model(), name="tiny")
    with server.listening():
        yield server


def engine_of(server: FakeServer) -> RemoteEngine:
    return RemoteEngine(server.url, tokenizer=tool_model().tokenizer.tokenizer)


def test_langchain_s_objects_are_those_of_a_model_here(
    server: FakeServer, engine: RemoteEngine, local: BlockAttentionEngine
) -> None:
    found, expected = (
        ChatBlockAttention(engine=one, max_tokens=60).with_structured_output(Tower).invoke(ASKED)
        for one in (engine, local)
    )
    assert isinstance(found, Tower)
    assert found == expected
    assert asked_of(server) == [{"response_format": BY_SCHEMA}]
    short = ChatBlockAttention(engine=engine, max_tokens=3).with_structured_output(Tower)
    with pytest.raises(IncompleteAnswerError, match="cut off at its token limit"):
        [*short.stream(ASKED)]


def test_llama_index_s_objects_are_those_of_a_model_here(
    server: FakeServer, engine: RemoteEngine, local: BlockAttentionEngine
) -> None:
    found, expected = (
        BlockAttentionLLM(engine=one, max_new_tokens=60).structured_predict(
            Tower, PromptTemplate("How tall?")
        )
        for one in (engine, local)
    )
    assert isinstance(found, Tower)
    assert found == expected
    assert asked_of(server) == [{"response_format": BY_SCHEMA}]


def test_choice_and_regex_are_sent_unchanged(server: FakeServer, engine: RemoteEngine) -> None:
    chat = ChatBlockAttention(engine=engine, max_tokens=10)
    choice, regex = {"choice": ["yes", "no"]}, {"regex": "[0-9]{4}"}
    assert chat.invoke(ASKED, structured_outputs=choice).content in ("yes", "no")
    assert len(chat.invoke(ASKED, structured_outputs=regex).text) == 4
    assert asked_of(server) == [{"structured_outputs": one} for one in (choice, regex)]


def test_a_forced_call_is_made_through_both_frameworks(behind: FakeServer) -> None:
    chat = ChatBlockAttention(engine=engine_of(behind), max_tokens=100)
    by_call = chat.with_structured_output(Tower, method="function_calling", include_raw=True)
    found = by_call.invoke(ASKED)
    assert isinstance(found["parsed"], Tower)
    assert found["raw"].tool_calls[0]["name"] == "Tower"

    def build(höhe: int) -> int:
        """Build a tower."""
        return höhe

    llm = BlockAttentionLLM(engine=engine_of(behind), max_new_tokens=100)
    tool = FunctionTool.from_defaults(build, fn_schema=Tower)
    answer = llm.chat_with_tools([tool], "How tall?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "build"
    assert all("grammar" in one["structured_outputs"] for one in asked_of(behind))
