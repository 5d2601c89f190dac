"""All forms of ``with_structured_output`` return complete objects of the schema, or raise."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest
from langchain_core.messages import AIMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field
from pydantic.v1 import BaseModel as BaseModelV1

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.errors import IncompleteAnswerError
from blockattn_rag.langchain import ChatBlockAttention, format_blocks
from blockattn_rag.langchain.structured_output import named_schema
from tests.langchain.conftest import passages

ASKED = [("system", format_blocks(passages())), ("human", "Which?")]


class Part(BaseModel):
    name: str = Field(max_length=3)


class Tower(BaseModel):
    """A tower."""

    höhe: int = Field(ge=0, le=99)
    parts: list[Part] = Field(max_length=2)


class Node(BaseModel):
    children: list[Node] = Field(max_length=1)


class TowerDict(TypedDict):
    """A tower."""

    höhe: int


class TowerV1(BaseModelV1):
    known: bool


SCHEMA = {**Tower.model_json_schema(), "title": "Turm"}


@pytest.fixture
def chat(engine: BlockAttentionEngine) -> ChatBlockAttention:
    return ChatBlockAttention(engine=engine, max_tokens=120)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_a_pydantic_class_returns_its_objects(chat: ChatBlockAttention, method: Any) -> None:
    structured = chat.with_structured_output(Tower, method=method)
    found = structured.invoke(ASKED)
    assert isinstance(found, Tower)
    assert await structured.ainvoke(ASKED) == found
    assert structured.batch([ASKED, ASKED]) == [found, found]


@pytest.mark.parametrize(
    ("schema", "keys"),
    [
        (SCHEMA, {"höhe", "parts"}),
        (convert_to_openai_tool(Tower), {"höhe", "parts"}),
        ({"name": "Tower", "schema": SCHEMA, "strict": True}, {"höhe", "parts"}),
    ],
)
def test_other_schemas_return_dicts(chat: ChatBlockAttention, schema: Any, keys: set[str]) -> None:
    assert chat.with_structured_output(schema).invoke(ASKED).keys() == keys


@pytest.mark.parametrize("wrong", [int, 3, "a tower"])
def test_an_invalid_schema_raises_value_error(chat: ChatBlockAttention, wrong: Any) -> None:
    with pytest.raises(ValueError, match="A schema must be a pydantic class, a TypedDict"):
        chat.with_structured_output(wrong)


def test_a_pydantic_v1_class_returns_its_objects(chat: ChatBlockAttention) -> None:
    assert isinstance(chat.with_structured_output(TowerV1).invoke(ASKED), TowerV1)


def test_names_and_references_of_schemas_are_kept() -> None:
    assert named_schema(SCHEMA) == {"name": "Turm", "schema": SCHEMA}
    assert named_schema(TowerDict)["name"] == "TowerDict"
    assert named_schema(TowerDict)["schema"]["required"] == ["höhe"]
    given = {"type": "json_schema", "json_schema": {"name": "T", "schema": SCHEMA}}
    assert named_schema(given) == {"name": "T", "schema": SCHEMA}
    assert named_schema({"type": "string"}) == {"name": "answer", "schema": {"type": "string"}}
    assert "$ref" in str(named_schema(Node)["schema"])


def test_the_raw_message_has_the_reuse_statistics(chat: ChatBlockAttention) -> None:
    chat.invoke(ASKED)
    found = chat.with_structured_output(Tower, include_raw=True).invoke(ASKED)
    assert isinstance(found["raw"], AIMessage)
    assert isinstance(found["parsed"], Tower)
    assert found["parsing_error"] is None
    usage = found["raw"].usage_metadata
    assert usage is not None
    assert usage["input_token_details"]["cache_read"] > 0


def test_an_answer_that_is_cut_off_raises(chat: ChatBlockAttention) -> None:
    short = chat.model_copy(update={"max_tokens": 12})
    for schema, method in ((Tower, "json_schema"), (SCHEMA, "json_mode")):
        structured = short.with_structured_output(schema, method=method)  # type: ignore[arg-type]
        with pytest.raises(IncompleteAnswerError, match="cut off at its token limit"):
            structured.invoke(ASKED)
        with pytest.raises(IncompleteAnswerError, match="cut off at its token limit"):
            list(structured.stream(ASKED))
    beside = short.with_structured_output(Tower, include_raw=True).invoke(ASKED)
    assert beside["parsed"] is None
    assert isinstance(beside["parsing_error"], IncompleteAnswerError)
    assert beside["raw"].response_metadata["finish_reason"] == "length"


async def test_a_stream_returns_partial_objects(chat: ChatBlockAttention) -> None:
    structured = chat.with_structured_output(SCHEMA)
    found = list(structured.stream(ASKED))
    assert len(found) > 1
    assert found[-1] == structured.invoke(ASKED)
    assert all(one.keys() <= {"höhe", "parts"} for one in found)
    assert [one async for one in structured.astream(ASKED)] == found


def test_only_json_mode_needs_no_schema(chat: ChatBlockAttention) -> None:
    structured = chat.with_structured_output(None, method="json_mode", include_raw=True)
    assert structured.invoke(ASKED)["raw"].content.lstrip().startswith("{")
    with pytest.raises(ValueError, match="requires a schema; "):
        chat.with_structured_output(None)


def test_unknown_methods_and_arguments_are_refused(chat: ChatBlockAttention) -> None:
    with pytest.raises(ValueError, match=r"Unknown method 'yaml': expected one of json_schema"):
        chat.with_structured_output(Tower, method="yaml")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'strict'"):
        chat.with_structured_output(Tower, stict=True)


def test_validators_outside_the_schema_still_run(chat: ChatBlockAttention) -> None:
    class Odd(Tower):
        def model_post_init(self, context: Any) -> None:
            raise ValueError("never right")

    found = chat.with_structured_output(Odd, include_raw=True).invoke(ASKED)
    assert found["parsed"] is None
    assert "never right" in str(found["parsing_error"])
