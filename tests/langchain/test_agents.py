from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import Field

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.adapters.handles import HANDLE_KEY
from blockattn_rag.check.oracle import oracle_generate
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
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import handle_of
from tests.engines import tuned_model
from tests.langchain.conftest import passages, reuse_of, scripted, tiny_block_model
from tests.models import tiny_tokenizer
from tests.scripted import TOOL_TEMPLATE, call_of, prompts_of

QUESTION = "<|user|>\n"
THREAD: Any = {"configurable": {"thread_id": "1"}}


class Numbered(BaseRetriever):
    """Retriever that returns the passages whose numbers are in the query."""

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


def steps(prompt: str) -> str:
    """Script of a model that looks up the user's question and then answers."""
    last = prompt.rpartition(QUESTION)[2].partition("<|end|>")[0]
    if last.startswith("<tool_response>"):
        return "Found it."
    return call_of("look_up", {"query": last.removeprefix("About ")})


def asking(text: str) -> Any:
    return {"messages": [("human", text)]}


def answers_of_turns(agent: Any, count: int) -> list[Any]:
    """Return the answers to questions about passages in one conversation."""
    turns = (asking(f"About {turn % 4} 3") for turn in range(count))
    return [agent.invoke(turn, THREAD)["messages"][-1] for turn in turns]


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


def test_the_model_is_informed_if_nothing_was_found(retriever: Numbered) -> None:
    tool = block_retriever_tool(retriever, "look_up", "Looks up.")
    assert tool.invoke({"query": "nine"}) == NOTHING_FOUND


def test_an_agent_with_a_retriever_tool_answers_from_stored_passages(retriever: Numbered) -> None:
    chat = scripted(steps)
    BlockKVTransformer(llm=chat).transform_documents(retriever.documents)
    agent = create_agent(
        chat, [block_retriever_tool(retriever, "look_up", "Looks up.")], system_prompt="Be brief."
    )
    messages = agent.invoke(asking("About 0 2"))["messages"]
    assert [type(one) for one in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert messages[-1].content == "Found it."
    reuse = reuse_of(messages[-1])
    assert (reuse["hits"], reuse["misses"]) == (2, 1)  # both passages; the text before them is new


def test_each_turn_of_an_agent_computes_only_new_tokens(retriever: Numbered) -> None:
    chat = scripted(steps)
    BlockKVTransformer(llm=chat).transform_documents(retriever.documents)
    tool = block_retriever_tool(retriever, "look_up", "Looks up.")
    agent = create_agent(chat, [tool], checkpointer=InMemorySaver())
    answers = answers_of_turns(agent, 5)
    assert {answer.content for answer in answers} == {"Found it."}
    first, *_, last = (answer.usage_metadata["input_tokens"] for answer in answers)
    assert last > 2 * first
    assert len({reuse_of(answer)["computed_tokens"] for answer in answers[1:]}) == 1


@pytest.fixture
def chat_with_tools() -> ChatBlockAttention:
    """A chat model that writes letters, with a chat template that supports tools."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    engine = BlockAttentionEngine(BlockModel(tiny_block_model().hf_model, tokenizer))
    return ChatBlockAttention(engine=engine, max_tokens=6)


def answer_of_oracle(chat: ChatBlockAttention, messages: list[BaseMessage]) -> str:
    """Compute the greedy answer with one dense forward pass per token."""
    model = chat.engine.model
    ids = model.tokenizer.prompt_ids(chat.to_prompt(messages))
    ends = sorted(model.end_token_ids)
    found = oracle_generate(model.hf_model, [*ids.context, ids.final], 6, ends)
    return str(model.tokenizer.tokenizer.decode(found))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("as_tool_call", [False, True])
async def test_answers_over_retrieved_passages_match_the_oracle(
    retriever: Numbered, chat_with_tools: ChatBlockAttention, as_tool_call: bool, is_async: bool
) -> None:
    chat = chat_with_tools
    BlockKVTransformer(llm=chat).transform_documents(retriever.documents)
    first = RetrieveFirst(retriever, as_tool_call=as_tool_call)
    agent = create_agent(chat, [], system_prompt="Be brief.", middleware=[first])
    given = asking("About 0 1")
    result = await agent.ainvoke(given) if is_async else agent.invoke(given)
    question, call, found, answer = result["messages"]
    assert question.content == "About 0 1"  # messages have the same form in both cases
    assert [one.page_content for one in found.artifact] == [x.page_content for x in passages(2)]
    assert reuse_of(answer)["hits"] == 2

    shown = [question, call, found]
    if not as_tool_call:
        shown = [HumanMessage(f"{found.content}\n\n{question.content}")]
    expected = answer_of_oracle(chat, [SystemMessage("Be brief."), *shown])
    assert answer.content == expected
    assert answer.content != answer_of_oracle(chat, [SystemMessage("Be brief."), question])


@pytest.mark.parametrize("as_tool_call", [False, True])
def test_later_turns_reuse_passages_looked_up_first(
    retriever: Numbered, as_tool_call: bool
) -> None:
    chat = scripted("Found it.")
    BlockKVTransformer(llm=chat).transform_documents(retriever.documents)
    first = RetrieveFirst(retriever, as_tool_call=as_tool_call)
    agent = create_agent(chat, [], middleware=[first], checkpointer=InMemorySaver())
    answers = answers_of_turns(agent, 4)
    assert len({reuse_of(answer)["computed_tokens"] for answer in answers[1:]}) == 1
    *_, prompt = prompts_of(chat)
    assert prompt.count("Passage 3:") == 4
    assert prompt.count("tool_call") == 4 * 2 * as_tool_call
    before = "<tool_response>" if as_tool_call else ""
    assert prompt.count(f"{QUESTION}{before}") >= 4
    if not as_tool_call:
        assert prompt.endswith("\n\nAbout 3 3<|end|>\n<|assistant|>\n")


def test_passages_precede_the_parts_of_a_question(retriever: Numbered) -> None:
    chat = scripted("Found it.")
    agent = create_agent(chat, [], middleware=[RetrieveFirst(retriever)])
    parts: list[Any] = [{"type": "text", "text": "About "}, {"type": "text", "text": "2"}]
    given: Any = {"messages": [HumanMessage(parts), AIMessage("Well?"), HumanMessage(parts)]}
    agent.invoke(given)
    (prompt,) = prompts_of(chat)
    first, second = prompt.split(QUESTION)[1:]
    assert first.startswith("About 2<|end|>")
    assert second.startswith("Passage 2:")
    assert "\n\nAbout 2<|end|>" in second


def test_passages_remain_if_a_middleware_removes_the_question(retriever: Numbered) -> None:
    class Newest(AgentMiddleware[Any, Any]):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(messages=request.messages[1:]))

    chat = scripted("Found it.")
    agent = create_agent(chat, [], middleware=[Newest(), RetrieveFirst(retriever)])
    agent.invoke(asking("About 2"))
    (prompt,) = prompts_of(chat)
    assert prompt.split(QUESTION)[1].startswith("Passage 2:")
    assert "tool_call" not in prompt


def test_tool_calls_of_the_model_are_kept(retriever: Numbered) -> None:
    call = call_of("retrieve", {"query": "3"})
    chat = scripted(lambda prompt: "Found it." if "<tool_response>" in prompt else call)
    tool = block_retriever_tool(retriever, "retrieve", "Looks up.")
    agent = create_agent(chat, [tool], middleware=[RetrieveFirst(retriever)])
    assert agent.invoke(asking("About 2"))["messages"][-1].content == "Found it."
    prompt = prompts_of(chat)[-1]
    assert retriever.queries == ["About 2", "3"]
    assert prompt.index("Passage 2:") < prompt.index("About 2") < prompt.index("<tool_response>")
    assert prompt.count("<tool_response>") == 1


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_follow_up_question_is_condensed(retriever: Numbered, is_async: bool) -> None:
    chat = scripted(lambda prompt: "3 please" if "Standalone question" in prompt else "Yes.")
    first = RetrieveFirst(retriever, condense=chat)
    agent = create_agent(chat, [], middleware=[first], checkpointer=InMemorySaver())
    for question in ("About 0", "And then?"):
        given = asking(question)
        await agent.ainvoke(given, THREAD) if is_async else agent.invoke(given, THREAD)
    assert retriever.queries == ["About 0", "3 please"]
    condensing = next(one for one in prompts_of(chat) if "Standalone question" in one)
    assert "Human: About 0\nAssistant: Yes.\n\nFollow-up question: And then?" in condensing


async def test_an_agents_stream_excludes_the_condensed_question(retriever: Numbered) -> None:
    chat = scripted(lambda prompt: "3 please" if "Standalone question" in prompt else "Yes.")
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
    with pytest.raises(TypeError, match="Expected a retriever"):
        block_retriever_tool(vectors, "look_up", "Looks up.")
    name: Any = "bundled"
    with pytest.raises(TypeError, match="a chat model for condense, found str"):
        RetrieveFirst(retriever, condense=name)


def test_templates_without_tool_results_get_passages_before_the_question(
    retriever: Numbered,
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{# no tool is known here #}{% for m in messages %}"
        "{% if m.role in ['user', 'assistant'] %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    model = tuned_model(tokenizer, max_position_embeddings=8192)
    chat = scripted("Found it.", 20, model=model)
    given: Any = {"messages": [("human", "About 0 1"), ("ai", "Well?"), ("human", "About 0 1")]}
    for as_tool_call in (False, True):
        first = RetrieveFirst(retriever, as_tool_call=as_tool_call)
        agent = create_agent(chat, [], middleware=[first])
        assert agent.invoke(given)["messages"][-1].content == "Found it."
    by_call, by_message = prompts_of(chat)
    assert by_call == by_message
    prompt = by_call.rpartition("<|user|>")[2]
    assert prompt.index("Passage 0:") < prompt.index("About 0 1")


def test_retrieval_only_runs_for_questions(retriever: Numbered) -> None:
    first = RetrieveFirst(retriever)
    assert first.before_agent({"messages": [HumanMessage(" ")]}, None) is None
    assert first.before_agent({"messages": [AIMessage("Hi")]}, None) is None
    assert first.before_agent({"messages": []}, None) is None
