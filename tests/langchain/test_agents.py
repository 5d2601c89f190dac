"""Agents over cached passages: LangChain's own, its tutorials' graphs, and looking up first."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import Field

from blockattn_rag.adapters.handles import HANDLE_KEY
from blockattn_rag.langchain import (
    BlockDocumentPrompt,
    BlockKVTransformer,
    ChatBlockAttention,
    HashingEmbeddings,
    RetrieveFirst,
    block_retriever_tool,
    without_markers,
)
from blockattn_rag.langchain.agents import NOTHING_FOUND
from blockattn_rag.prompts.blocks import handle_of
from tests.engines import tuned_model
from tests.langchain.conftest import passages
from tests.models import tiny_tokenizer
from tests.scripted import Script, ScriptedEngine, prompts_of

QUESTION = "<|user|>\n"


class Numbered(BaseRetriever):
    """Finds the passages whose numbers are in the query."""

    documents: list[Document]
    queries: list[str] = Field(default_factory=list)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        self.queries.append(query)
        return [one for n, one in enumerate(self.documents) if str(n) in query.split()]


@pytest.fixture
def retriever() -> Numbered:
    return Numbered(documents=passages(4))


def looking_up(query: str, name: str = "look_up") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


def steps(prompt: str) -> str:
    """Looks up what the user asks for, then answers."""
    last = prompt.rpartition(QUESTION)[2].partition("<|end|>")[0]
    if last.startswith("<tool_response>"):
        return "Found it."
    return looking_up(last.removeprefix("About "))


def chat_that(script: Script) -> ChatBlockAttention:
    return ChatBlockAttention(engine=ScriptedEngine(script), max_tokens=200)


def reuse_of(message: BaseMessage) -> dict[str, Any]:
    figures: dict[str, Any] = message.response_metadata["block_attention"]
    return figures


async def test_retriever_tool_gives_marked_text_and_handles(retriever: Numbered) -> None:
    prompt = BlockDocumentPrompt.from_template("title: {title}\n\n{page_content}")
    tool = block_retriever_tool(retriever, "look_up", "Looks up.", document_prompt=prompt)
    call = {"name": "look_up", "args": {"query": "1 2"}, "id": "a", "type": "tool_call"}
    found = tool.invoke(call)
    assert found == await tool.ainvoke(call)
    assert without_markers(found).content.startswith("title: Title 1\n\n Passage 1:")
    shown = [prompt.canonical_text(document) for document in passages(3)[1:]]
    assert [one.metadata[HANDLE_KEY] for one in found.artifact] == [*map(handle_of, shown)]
    assert retriever.queries == ["1 2", "1 2"]


def test_the_model_sees_that_nothing_was_found(retriever: Numbered) -> None:
    tool = block_retriever_tool(retriever, "look_up", "Looks up.")
    assert tool.invoke({"query": "nine"}) == NOTHING_FOUND


def test_an_agent_with_a_retriever_s_tool_answers_from_stored_passages(retriever: Numbered) -> None:
    chat = chat_that(steps)
    BlockKVTransformer(llm=chat).transform_documents(retriever.documents)
    agent = create_agent(
        chat, [block_retriever_tool(retriever, "look_up", "Looks up.")], system_prompt="Be brief."
    )
    given: Any = {"messages": [("human", "About 0 2")]}
    messages = agent.invoke(given)["messages"]
    assert [type(one) for one in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert messages[-1].content == "Found it."
    reuse = reuse_of(messages[-1])
    assert (reuse["hits"], reuse["misses"]) == (2, 1)  # the passages; all before them is new


def test_each_turn_of_an_agent_computes_what_is_new(retriever: Numbered) -> None:
    chat = chat_that(steps)
    BlockKVTransformer(llm=chat).transform_documents(retriever.documents)
    tool = block_retriever_tool(retriever, "look_up", "Looks up.")
    agent = create_agent(chat, [tool], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    computed, prompts = [], []
    for turn in range(5):
        given: Any = {"messages": [("human", f"About {turn % 4} 3")]}
        last = agent.invoke(given, config)["messages"][-1]
        assert last.content == "Found it."
        computed.append(reuse_of(last)["computed_tokens"])
        prompts.append(last.usage_metadata["input_tokens"])
    assert prompts[-1] > 2 * prompts[0]
    assert len(set(computed[1:])) == 1  # the same in every turn, however long the history


@pytest.mark.parametrize("is_async", [False, True])
async def test_passages_are_looked_up_before_the_model_is_asked(
    retriever: Numbered, chat: ChatBlockAttention, is_async: bool
) -> None:
    BlockKVTransformer(llm=chat).transform_documents(retriever.documents)
    # The model's template knows no tools.
    agent = create_agent(chat, [], middleware=[RetrieveFirst(retriever)])
    given: Any = {"messages": [("human", "About 0 1")]}
    result = await agent.ainvoke(given) if is_async else agent.invoke(given)
    kinds = [type(one) for one in result["messages"]]
    assert kinds == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert reuse_of(result["messages"][-1])["hits"] == 2
    assert [one.page_content for one in result["messages"][2].artifact] == [
        one.page_content for one in passages(2)
    ]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_follow_up_question_is_condensed(retriever: Numbered, is_async: bool) -> None:
    chat = chat_that(lambda prompt: "3 please" if "Standalone question" in prompt else "Yes.")
    first = RetrieveFirst(retriever, condense=chat)
    agent = create_agent(chat, [], middleware=[first], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    for question in ("About 0", "And then?"):
        given: Any = {"messages": [("human", question)]}
        await agent.ainvoke(given, config) if is_async else agent.invoke(given, config)
    assert retriever.queries == ["About 0", "3 please"]
    condensing = next(one for one in prompts_of(chat) if "Standalone question" in one)
    assert "Human: About 0\nAssistant: Yes.\n\nFollow-up question: And then?" in condensing


async def test_an_agents_stream_excludes_the_condensed_question(retriever: Numbered) -> None:
    chat = chat_that(lambda prompt: "3 please" if "Standalone question" in prompt else "Yes.")
    agent = create_agent(chat, [], middleware=[RetrieveFirst(retriever, condense=chat)])
    asked: Any = {"messages": [("human", "About 0"), ("ai", "Yes."), ("human", "And then?")]}
    whole: Any = [*agent.stream(asked, stream_mode="messages")]
    later: Any = [one async for one in agent.astream(asked, stream_mode="messages")]
    for chunks in (whole, later):
        text = "".join(chunk.text for chunk, _ in chunks)
        assert ("Yes." in text, "3 please" in text) == (True, False)
    assert retriever.queries == ["3 please", "3 please"]


def test_invalid_retrievers_and_models_raise_in_the_constructor(retriever: Numbered) -> None:
    vectors: Any = InMemoryVectorStore(HashingEmbeddings(8))
    with pytest.raises(TypeError, match=r"found InMemoryVectorStore; pass .* as_retriever"):
        RetrieveFirst(vectors)
    with pytest.raises(TypeError, match="expected a retriever"):
        block_retriever_tool(vectors, "look_up", "Looks up.")
    name: Any = "bundled"
    with pytest.raises(TypeError, match="a chat model for condense, found str"):
        RetrieveFirst(retriever, condense=name)


def test_template_without_tool_results_gets_passages_first(retriever: Numbered) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{# no tool is known here #}{% for m in messages %}"
        "{% if m.role in ['user', 'assistant'] %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    model = tuned_model(tokenizer, max_position_embeddings=8192)
    engine = ScriptedEngine(lambda _: "Found it.", model=model)
    chat = ChatBlockAttention(engine=engine, max_tokens=20)
    agent = create_agent(chat, [], middleware=[RetrieveFirst(retriever)])
    given: Any = {"messages": [("human", "About 0 1")]}
    assert agent.invoke(given)["messages"][-1].content == "Found it."
    (prompt,) = engine.prompts
    assert prompt.index("Passage 0:") < prompt.index("About 0 1")


def test_only_questions_are_looked_up(retriever: Numbered) -> None:
    first = RetrieveFirst(retriever)
    assert first.before_agent({"messages": [HumanMessage(" ")]}, None) is None
    assert first.before_agent({"messages": [AIMessage("Hi")]}, None) is None
    assert first.before_agent({"messages": []}, None) is None
