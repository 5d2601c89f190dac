"""Use cases of a chat model in LangChain: calls, histories, structured output, tools."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from kits import LangChainKit
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, trim_messages
from langchain_core.output_parsers import PydanticOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import tool
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from pydantic import BaseModel, Field
from registry import QUESTION, SECOND_QUESTION, Run, langchain


class Height(BaseModel):
    """How tall something is."""

    metres: int = Field(ge=0, le=999)


class HeightDict(TypedDict):
    """How tall something is."""

    unit: Literal["metres", "feet"]


@tool
def look_up(place: Literal["Halden Tower", "Lake Gulnock"]) -> str:
    """Looks a place up."""
    return f"{place} is 214 metres tall."


# -- conversations ---------------------------------------------------------------------------


@langchain("conversation over passages")
def _(kit: LangChainKit) -> Any:
    turns = [
        ("system", kit.found()),
        ("human", QUESTION),
        ("ai", "214 metres."),
        ("human", "Sure?"),
    ]
    return kit.chat.invoke(turns).content


@langchain("RunnableWithMessageHistory")
def _(kit: LangChainKit) -> Any:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "{context}"), MessagesPlaceholder("history"), ("human", "{input}")]
    )
    history = InMemoryChatMessageHistory()
    chain = RunnableWithMessageHistory(
        prompt | kit.chat,
        lambda _: history,
        input_messages_key="input",
        history_messages_key="history",
    )
    session: Any = {"configurable": {"session_id": "1"}}
    for question in (QUESTION, SECOND_QUESTION):
        chain.invoke({"context": kit.found(), "input": question}, session)
    return len(history.messages) == 4 and history.messages[-1].text


@langchain("trim_messages, counted by the model")
def _(kit: LangChainKit) -> Any:
    history = [HumanMessage("Once more. " * 20), AIMessage("Yes."), HumanMessage(QUESTION)]
    trimmer = trim_messages(max_tokens=40, token_counter=kit.chat, start_on="human")
    assert trimmer.invoke(history) == history[2:]
    return (trimmer | kit.chat).invoke(history).content


# -- calls -----------------------------------------------------------------------------------


@langchain("stop strings")
def _(kit: LangChainKit) -> Any:
    free = kit.chain.invoke(QUESTION).text
    word = free.split()[2]
    prompt = {"context": kit.found(), "input": QUESTION}
    stopped = (kit.prompt | kit.chat.bind(stop=[word])).invoke(prompt).text
    return stopped and word not in stopped


@langchain("an answer cache")
def _(kit: LangChainKit) -> Any:
    cached = kit.chat.model_copy(update={"cache": InMemoryCache()})
    return [cached.invoke(QUESTION).content for _ in range(2)][1]


@langchain("with_retry, with_fallbacks")
def _(kit: LangChainKit) -> Any:
    def fails(_: Any) -> Any:
        raise ConnectionError("a server that is down")

    safe = RunnableLambda(fails).with_fallbacks([kit.chat.with_retry(stop_after_attempt=2)])
    return safe.invoke(QUESTION).content


@langchain("configurable_fields")
def _(kit: LangChainKit) -> Any:
    field = ConfigurableField("length")
    chat = kit.chat.configurable_fields(max_tokens=field)
    return chat.invoke(QUESTION, {"configurable": {"length": 4}}).content


@langchain("a rate limiter")
def _(kit: LangChainKit) -> Any:
    limiter = InMemoryRateLimiter(requests_per_second=1000)
    return kit.chat.model_copy(update={"rate_limiter": limiter}).invoke(QUESTION).content


@langchain("callbacks: tokens as they come")
def _(kit: LangChainKit) -> Any:
    class Tokens(BaseCallbackHandler):
        heard = ""

        def on_llm_new_token(self, token: str, **_: Any) -> None:
            self.heard += token

    tokens = Tokens()
    said = "".join(piece.text for piece in kit.chat.stream(QUESTION, {"callbacks": [tokens]}))
    return said and tokens.heard == said


@langchain("tracing: a run for each step")
def _(kit: LangChainKit) -> Any:
    collector = RunCollectorCallbackHandler()
    kit.chain.invoke(QUESTION, {"callbacks": [collector], "tags": ["a"], "metadata": {"b": 1}})
    [run] = collector.traced_runs
    return any(child.run_type == "llm" for child in run.child_runs)


@langchain("usage_metadata")
def _(kit: LangChainKit) -> Any:
    return kit.chain.invoke(QUESTION).usage_metadata


@langchain("logprobs")
def _(kit: LangChainKit) -> Any:
    return kit.chat.bind(logprobs=True).invoke(QUESTION).response_metadata.get("logprobs")


@langchain("get_num_tokens_from_messages")
def _(kit: LangChainKit) -> Any:
    return kit.chat.get_num_tokens_from_messages([HumanMessage(QUESTION)])


@langchain("profile")
def _(kit: LangChainKit) -> Any:
    return (kit.chat.profile or {}).get("max_input_tokens")


@langchain("dumpd of a chain")
def _(kit: LangChainKit) -> Any:
    return dumpd(kit.prompt | kit.chat)["kwargs"]["last"]


# -- structured output -----------------------------------------------------------------------


def _object_by(method: str) -> Run:
    def ask(kit: LangChainKit) -> Any:
        found = kit.caller.with_structured_output(Height, method=method).invoke(QUESTION)
        return isinstance(found, Height)

    return ask


for _method in ("json_schema", "json_mode", "function_calling"):
    langchain(f"with_structured_output: {_method}")(_object_by(_method))


@langchain("with_structured_output: a TypedDict")
def _(kit: LangChainKit) -> Any:
    found = kit.caller.with_structured_output(HeightDict).invoke(QUESTION)
    return found["unit"] in {"metres", "feet"}


@langchain("with_structured_output: include_raw, over passages")
def _(kit: LangChainKit) -> Any:
    structured = kit.caller.with_structured_output(Height, include_raw=True)
    found = (kit.prompt | structured).invoke({"context": kit.found(), "input": QUESTION})
    return isinstance(found["parsed"], Height) and found["raw"]


@langchain("with_structured_output: stream")
def _(kit: LangChainKit) -> Any:
    schema = Height.model_json_schema()
    *_, last = kit.caller.with_structured_output(schema).stream(QUESTION)
    return Height.model_validate(last)


@langchain("PydanticOutputParser, its instructions in the prompt", by_format=True)
def _(kit: LangChainKit) -> Any:
    parser = PydanticOutputParser(pydantic_object=Height)
    return (kit.chat | parser).invoke(f"{QUESTION}\n\n{parser.get_format_instructions()}")


# -- tools -----------------------------------------------------------------------------------


@langchain("bind_tools: a call is required")
def _(kit: LangChainKit) -> Any:
    answer = kit.caller.bind_tools([look_up], tool_choice="any").invoke(QUESTION)
    return answer.tool_calls and look_up.invoke(answer.tool_calls[0])


@langchain("bind_tools: the stream of a call")
def _(kit: LangChainKit) -> Any:
    pieces = kit.caller.bind_tools([look_up], tool_choice="any").stream(QUESTION)
    return any(chunk for piece in pieces for chunk in piece.tool_call_chunks)


@langchain("bind_tools: results in the history")
def _(kit: LangChainKit) -> Any:
    call = {"name": "look_up", "args": {"place": "Halden Tower"}, "id": "1"}
    turns = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage("214 metres.", tool_call_id="1"),
    ]
    return kit.chat.bind_tools([look_up]).invoke(turns).content


@langchain("a retriever tool, its passages in the history")
def _(kit: LangChainKit) -> Any:
    call = {"name": "encyclopedia", "args": {"query": QUESTION}, "id": "1", "type": "tool_call"}
    found = kit.tool.invoke(call)
    turns = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), found]
    return kit.chat.bind_tools([kit.tool]).invoke(turns).content
