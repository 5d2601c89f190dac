"""Use cases of LangChain's agents and graphs."""

from __future__ import annotations

from typing import Any, Literal

from kits import LangChainKit
from langchain.agents import create_agent
from langchain.agents.middleware import (
    SummarizationMiddleware,
    dynamic_prompt,
    wrap_model_call,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_classic.agents import AgentExecutor, create_react_agent
from langchain_core.messages import AIMessage
from langchain_core.prompts import PromptTemplate
from langchain_models import Height, look_up
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel
from registry import QUESTION, SECOND_QUESTION, langchain

from blockattn_rag.langchain import RetrieveFirst

THREAD: Any = {"configurable": {"thread_id": "1"}}


def _asked(agent: Any, question: str = QUESTION, config: Any = None) -> Any:
    return agent.invoke({"messages": [("human", question)]}, config)


@langchain("create_agent: tools that it may call")
def _(kit: LangChainKit) -> Any:
    return _asked(create_agent(kit.chat, [look_up, kit.tool]))["messages"][-1].text


@langchain("create_agent: response_format")
def _(kit: LangChainKit) -> Any:
    agent: Any = create_agent(kit.caller, [], response_format=Height)
    return isinstance(_asked(agent)["structured_response"], Height)


@langchain("create_agent: response_format by a tool")
def _(kit: LangChainKit) -> Any:
    # LangChain rejects answers with two objects, and a small model may repeat the call.
    @wrap_model_call
    def one_call(request: Any, handler: Any) -> Any:
        return handler(request.override(model_settings={"parallel_tool_calls": False}))

    agent: Any = create_agent(
        kit.caller, [], response_format=ToolStrategy(Height), middleware=[one_call]
    )
    return isinstance(_asked(agent)["structured_response"], Height)


@langchain("create_agent: dynamic_prompt with passages (RAG tutorial)")
def _(kit: LangChainKit) -> Any:
    @dynamic_prompt
    def with_passages(request: Any) -> str:
        question = request.state["messages"][-1].text
        return f"Use this context:\n\n{kit.show(kit.retriever.invoke(question))}"

    return _asked(create_agent(kit.chat, [], middleware=[with_passages]))["messages"][-1].text


@langchain("create_agent: passages looked up first, two turns")
def _(kit: LangChainKit) -> Any:
    agent: Any = create_agent(
        kit.chat, [], middleware=[RetrieveFirst(kit.retriever)], checkpointer=InMemorySaver()
    )
    _asked(agent, QUESTION, THREAD)
    return _asked(agent, SECOND_QUESTION, THREAD)["messages"][-1].text


@langchain("create_agent: streamed tokens")
def _(kit: LangChainKit) -> Any:
    agent: Any = create_agent(kit.chat, [])
    given: Any = {"messages": [("human", QUESTION)]}
    pieces = [piece.text for piece, _ in agent.stream(given, stream_mode="messages")]
    return len(pieces) > 1 and "".join(pieces)


@langchain("create_agent: memory by a checkpointer, summarized")
def _(kit: LangChainKit) -> Any:
    summary = SummarizationMiddleware(kit.chat, trigger=("messages", 3), keep=("messages", 1))
    agent: Any = create_agent(kit.chat, [], middleware=[summary], checkpointer=InMemorySaver())
    _asked(agent, QUESTION, THREAD)
    messages = _asked(agent, SECOND_QUESTION, THREAD)["messages"]
    return "summary" in messages[0].text and messages[-1].text


@langchain("create_react_agent: calls written in words", by_format=True)
def _(kit: LangChainKit) -> Any:
    prompt = PromptTemplate.from_template(
        "Tools:\n{tools}\n\nWrite 'Thought:', 'Action:' (one of {tool_names}), 'Action Input:', or "
        "'Final Answer:'.\n\nQuestion: {input}\nThought:{agent_scratchpad}"
    )
    agent = create_react_agent(kit.chat, [look_up], prompt)
    return AgentExecutor(agent=agent, tools=[look_up]).invoke({"input": QUESTION})["output"]


class Grade(BaseModel):
    """Whether a document is relevant to a question."""

    binary_score: Literal["yes", "no"]


@langchain("agentic RAG graph: look up, grade, answer or rewrite")
def _(kit: LangChainKit) -> Any:
    def call(state: MessagesState) -> Any:
        query = {"query": state["messages"][-1].text}
        calls: Any = [{"name": kit.tool.name, "args": query, "id": "1"}]
        return {"messages": [AIMessage("", tool_calls=calls)]}

    def grade(state: MessagesState) -> Literal["answer", "rewrite"]:
        context = state["messages"][-1].text
        prompt = f"Here is the document:\n\n{context}\n\nIs it relevant to the question: {QUESTION}"
        found = kit.caller.with_structured_output(Grade).invoke([("human", prompt)])
        return "answer" if found.binary_score == "yes" else "rewrite"

    def rewrite(_: MessagesState) -> Any:
        return {"messages": [kit.chat.invoke(f"Say the question in better words: {QUESTION}")]}

    def answer(state: MessagesState) -> Any:
        context = [one.text for one in state["messages"] if one.type == "tool"][-1]
        prompt = f"Context:\n\n{context}\n\nQuestion: {QUESTION}"
        return {"messages": [kit.chat.invoke([("human", prompt)])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("call", call)
    graph.add_node("look_up", ToolNode([kit.tool]))
    graph.add_node("rewrite", rewrite)
    graph.add_node("answer", answer)
    graph.add_edge(START, "call")
    graph.add_edge("call", "look_up")
    graph.add_conditional_edges("look_up", grade)
    graph.add_edge("rewrite", "answer")
    graph.add_edge("answer", END)
    return _asked(graph.compile())["messages"][-1].text
