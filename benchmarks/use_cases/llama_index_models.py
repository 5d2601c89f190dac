"""Use cases of an LLM in LlamaIndex: calls, structured output, tools, agents, memory."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from kits import LlamaIndexKit
from langchain_models import Height
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.memory import FactExtractionMemoryBlock, Memory
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool, RetrieverTool
from pydantic import BaseModel
from registry import QUESTION, SECOND_QUESTION, llama_index

ASKED = [ChatMessage(QUESTION)]


class Place(BaseModel):
    place: Literal["Halden Tower", "Lake Gulnock"]


def look_up(place: str) -> str:
    """Looks a place up."""
    return f"{place} is 214 metres tall."


TOOL = FunctionTool.from_defaults(look_up, fn_schema=Place)

# -- calls -----------------------------------------------------------------------------------


@llama_index("complete, acomplete")
def _(kit: LlamaIndexKit) -> Any:
    return kit.llm.complete(QUESTION).text and asyncio.run(kit.llm.acomplete(QUESTION)).text


@llama_index("stream_complete")
def _(kit: LlamaIndexKit) -> Any:
    return "".join(step.delta or "" for step in kit.llm.stream_complete(QUESTION))


@llama_index("achat")
def _(kit: LlamaIndexKit) -> Any:
    return asyncio.run(kit.llm.achat(ASKED)).message.content


@llama_index("stream_chat")
def _(kit: LlamaIndexKit) -> Any:
    return "".join(step.delta or "" for step in kit.llm.stream_chat(ASKED))


@llama_index("astream_chat")
def _(kit: LlamaIndexKit) -> Any:
    async def pieces() -> list[str]:
        return [step.delta or "" async for step in await kit.llm.astream_chat(ASKED)]

    return "".join(asyncio.run(pieces()))


@llama_index("TokenCountingHandler")
def _(kit: LlamaIndexKit) -> Any:
    counter = TokenCountingHandler()
    kit.llm.callback_manager = CallbackManager([counter])
    try:
        kit.llm.chat(ASKED)
    finally:
        kit.llm.callback_manager = CallbackManager()
    return counter.prompt_llm_token_count > 0 and counter.completion_llm_token_count > 0


@llama_index("instrumentation: events of a query")
def _(kit: LlamaIndexKit) -> Any:
    heard = set()

    class Names(BaseEventHandler):
        def handle(self, event: Any, **_: Any) -> None:
            heard.add(event.class_name())

    names, dispatcher = Names(), get_dispatcher()
    dispatcher.add_event_handler(names)
    try:
        kit.query()
    finally:
        dispatcher.event_handlers.remove(names)
    return {"QueryStartEvent", "LLMChatStartEvent", "LLMChatEndEvent"} <= heard


@llama_index("to_dict of an LLM")
def _(kit: LlamaIndexKit) -> Any:
    return kit.llm.to_dict()["class_name"]


# -- structured output -----------------------------------------------------------------------


@llama_index("structured_predict")
def _(kit: LlamaIndexKit) -> Any:
    return isinstance(kit.caller.structured_predict(Height, PromptTemplate(QUESTION)), Height)


@llama_index("stream_structured_predict")
def _(kit: LlamaIndexKit) -> Any:
    *_, last = kit.caller.stream_structured_predict(Height, PromptTemplate(QUESTION))
    return isinstance(last, Height)


@llama_index("as_structured_llm")
def _(kit: LlamaIndexKit) -> Any:
    return isinstance(kit.caller.as_structured_llm(Height).chat(ASKED).raw, Height)


@llama_index("LLMTextCompletionProgram", by_format=True)
def _(kit: LlamaIndexKit) -> Any:
    program = LLMTextCompletionProgram.from_defaults(
        PydanticOutputParser(Height), prompt_template_str=QUESTION, llm=kit.caller
    )
    return isinstance(program(), Height)


# -- tools and agents ------------------------------------------------------------------------


@llama_index("chat_with_tools: a call is required")
def _(kit: LlamaIndexKit) -> Any:
    answer = kit.caller.chat_with_tools([TOOL], QUESTION, tool_required=True)
    return kit.caller.get_tool_calls_from_response(answer)


@llama_index("stream_chat_with_tools")
def _(kit: LlamaIndexKit) -> Any:
    *_, last = kit.caller.stream_chat_with_tools([TOOL], QUESTION, tool_required=True)
    return kit.caller.get_tool_calls_from_response(last)


@llama_index("predict_and_call")
def _(kit: LlamaIndexKit) -> Any:
    answer = kit.caller.predict_and_call([TOOL], QUESTION, tool_choice="look_up")
    return "214" in str(answer)


def _ran(agent: Any) -> str:
    async def run() -> str:
        return str(await agent.run(QUESTION, max_iterations=3))

    return asyncio.run(run())


def _look_up_tool(kit: LlamaIndexKit) -> Any:
    return RetrieverTool.from_defaults(
        kit.retriever,
        node_postprocessors=kit.postprocessors,
        name="encyclopedia",
        description="All.",
    )


@llama_index("RetrieverTool, its passages in the history")
def _(kit: LlamaIndexKit) -> Any:
    tool = _look_up_tool(kit)
    call = ToolCallBlock(tool_call_id="1", tool_name=tool.metadata.name, tool_kwargs={"input": ""})
    turns = [
        ChatMessage(QUESTION),
        ChatMessage(role="assistant", blocks=[call]),
        ChatMessage(str(tool(QUESTION)), role="tool", additional_kwargs={"tool_call_id": "1"}),
    ]
    return kit.llm.chat(turns).message.content


@llama_index("FunctionAgent")
def _(kit: LlamaIndexKit) -> Any:
    return _ran(FunctionAgent(tools=[TOOL, _look_up_tool(kit)], llm=kit.llm))


@llama_index("FunctionAgent: initial_tool_choice")
def _(kit: LlamaIndexKit) -> Any:
    return _ran(FunctionAgent(tools=[TOOL], llm=kit.caller, initial_tool_choice="look_up"))


@llama_index("ReActAgent")
def _(kit: LlamaIndexKit) -> Any:
    return _ran(ReActAgent(tools=[TOOL], llm=kit.llm, streaming=False))


@llama_index("AgentWorkflow of two agents")
def _(kit: LlamaIndexKit) -> Any:
    agents: Any = [
        ReActAgent(name=name, description=f"Does {name}.", tools=[TOOL], llm=kit.llm)
        for name in ("research", "writing")
    ]
    agents[0].can_handoff_to = ["writing"]
    return _ran(AgentWorkflow(agents=agents, root_agent="research"))


# -- memory ----------------------------------------------------------------------------------


@llama_index("Memory of a chat engine")
def _(kit: LlamaIndexKit) -> Any:
    memory = Memory.from_defaults(session_id="1", token_limit=2000)
    options: Any = {"llm": kit.llm, "node_postprocessors": kit.postprocessors, "memory": memory}
    engine = kit.index.as_chat_engine("context", **options)
    for question in (QUESTION, SECOND_QUESTION):
        engine.chat(question)
    return len(memory.get_all()) == 4


@llama_index("FactExtractionMemoryBlock", by_format=True)
def _(kit: LlamaIndexKit) -> Any:
    block = FactExtractionMemoryBlock(llm=kit.llm, max_facts=3)

    async def remember() -> Any:
        await block.aput(messages=[ChatMessage(QUESTION), ChatMessage("214.", role="assistant")])
        return await block.aget()

    return asyncio.run(remember())
