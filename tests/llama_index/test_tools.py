"""Tools of the LLM, and LlamaIndex agents over cached passages."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.tools import FunctionTool, RetrieverTool

from blockattn_rag.adapters.exchange import template_messages
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import ToolCallError
from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVPostprocessor, BlockKVTransform
from blockattn_rag.llama_index.messages import INVALID_CALLS, chat_turns
from tests.llama_index.conftest import Fixed, scripted
from tests.scripted import Script, ScriptedEngine, prompts_of

# LlamaIndex's agents use deprecated names of pydantic and of LlamaIndex workflows.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
MALFORMED = '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add)


def then(last: str) -> Script:
    """Script of a model that calls ``add``, and returns ``last`` once it has the result."""
    return lambda prompt: last if "<tool_response>" in prompt else CALL


def calls_of(response: ChatResponse) -> list[tuple[str, Any]]:
    blocks = [one for one in response.message.blocks if isinstance(one, ToolCallBlock)]
    return [(one.tool_name, one.tool_kwargs) for one in blocks]


def test_a_template_with_tools_makes_a_function_calling_model(engine: BlockAttentionEngine) -> None:
    assert isinstance(scripted(""), FunctionCallingLLM)
    assert scripted("").metadata.is_function_calling_model
    plain = BlockAttentionLLM(engine=engine)
    assert not plain.metadata.is_function_calling_model
    with pytest.raises(ValueError, match="does not support tools"):
        plain.chat_with_tools([ADD], "1 + 2?")


def test_a_tool_is_called_and_its_result_returned() -> None:
    assert str(scripted(CALL).predict_and_call([ADD], "1 + 2?")) == "3"


def test_a_missing_or_malformed_call_raises_if_one_is_required() -> None:
    with pytest.raises(ToolCallError, match="the model answered 'Three'"):
        scripted("Three").predict_and_call([ADD], "1 + 2?")
    with pytest.raises(ToolCallError, match=r"invalid tool call.*add"):
        scripted(MALFORMED).predict_and_call([ADD], "1 + 2?")
    llm = scripted(MALFORMED)
    response = llm.chat_with_tools([ADD], "1 + 2?")
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    assert response.message.additional_kwargs[INVALID_CALLS][0]["name"] == "add"
    assert '"name": "add"' in str(response.message.content)


def test_a_required_call_is_enforced_by_a_grammar() -> None:
    options = scripted("")._prepare_chat_with_tools([ADD], "1 + 2?", tool_required=True)
    assert options["tool_choice"] == "required"


def test_calls_and_results_are_in_the_next_prompt() -> None:
    call = ToolCallBlock(tool_call_id="x", tool_name="add", tool_kwargs={"a": 1, "b": 2})
    history = [
        ChatMessage(role="user", content="1 + 2?"),
        ChatMessage(role="assistant", blocks=[call]),
        ChatMessage(role="tool", content="3", additional_kwargs={"tool_call_id": "x"}),
    ]
    turns = template_messages(chat_turns(history))
    assert turns[2] == {"role": "tool", "content": "3", "tool_call_id": "x", "name": "add"}


def test_results_of_calls_without_an_id_are_named_after_their_tool() -> None:
    call = ToolCallBlock(tool_name="add", tool_kwargs={"a": 1, "b": 2})
    history = [ChatMessage(role="assistant", blocks=[call]), ChatMessage(role="tool", content="3")]
    assert template_messages(chat_turns(history))[1]["name"] == "add"
    llm = scripted("Three.")
    llm.chat(history)
    assert f"<|assistant|>\n{CALL}<|end|>\n<|user|>\n<tool_response>\n3\n" in prompts_of(llm)[0]


def test_an_earlier_call_with_invalid_json_raises_value_error() -> None:
    call = ToolCallBlock(tool_call_id="x", tool_name="add", tool_kwargs='{"a": 1')
    with pytest.raises(ValueError, match=r"call of add whose arguments are not JSON.*'\{\"a\": 1'"):
        list(chat_turns([ChatMessage(role="assistant", blocks=[call])]))


def test_tools_are_refused_if_a_function_replaces_the_template() -> None:
    llm = BlockAttentionLLM(
        engine=ScriptedEngine(lambda _: "No."), messages_to_prompt=lambda _: "Hi"
    )
    with pytest.raises(ValueError, match="messages_to_prompt replaces the template"):
        llm.chat_with_tools([ADD], "1 + 2?")


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_function_agent_calls_tools_and_answers(streaming: bool) -> None:
    llm = scripted(then("Three."))
    agent = FunctionAgent(tools=[ADD], llm=llm, streaming=streaming)
    assert str(await agent.run("1 + 2?")) == "Three."
    assert len(prompts_of(llm)) == 2


async def test_a_function_agent_reuses_the_passages_that_its_tool_finds() -> None:
    nodes: list[BaseNode] = [TextNode(text=f"Passage {n} tells of {n}.") for n in range(3)]
    call = '<tool_call>\n{"name": "retriever", "arguments": {"input": "numbers"}}\n</tool_call>'
    llm = scripted(lambda prompt: "Found." if "<tool_response>" in prompt else call)
    nodes = BlockKVTransform(llm=llm)(nodes)
    tool = RetrieverTool.from_defaults(
        Fixed(nodes),
        node_postprocessors=[BlockKVPostprocessor()],
        name="retriever",
        description="Looks up.",
    )
    answer: Any = await FunctionAgent(tools=[tool], llm=llm).run("Which numbers?")
    assert str(answer) == "Found."
    assert answer.raw["usage"]["hits"] == 3
