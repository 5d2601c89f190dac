"""Hostile conversations through LangChain's own parts: prompts, chains and tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool
from pydantic import PrivateAttr

from blockattn_rag.langchain import (
    HANDLE_KEY,
    BlockAttentionLLM,
    BlockDocumentPrompt,
    ChatBlockAttention,
    format_blocks,
)
from blockattn_rag.prompts.blocks import BlockPrompt
from tests.hostile.families import Family
from tests.hostile.judge import Asked
from tests.hostile.llama_index_parts import everything, in_json, thoughts, typed_history
from tests.hostile.texts import Passage, Sample
from tests.models import shared_tiny_llama

TITLED = "title: {title}\n\n{page_content}"
PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "{system}\n\nContext:\n{context}"),
        MessagesPlaceholder("history"),
        ("human", "{input}"),
    ]
)


class RecordingChat(ChatBlockAttention):
    """Keeps the prompts that it is asked, and answers nothing."""

    _prompts: list[BlockPrompt] = PrivateAttr(default_factory=list)

    @property
    def prompts(self) -> list[BlockPrompt]:
        """The prompts since the last time somebody looked."""
        prompts = list(self._prompts)
        self._prompts.clear()
        return prompts

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self._prompts.append(self.to_prompt(messages))
        return ChatResult(generations=[ChatGeneration(message=AIMessage(""))])


def recording_chat(family: Family, **fields: Any) -> RecordingChat:
    """A chat model of the family that never runs its model."""
    make: Any = RecordingChat
    chat: RecordingChat = make(
        model=shared_tiny_llama(), model_kwargs={"tokenizer": family.tokenizer}, **fields
    )
    return chat


class FixedRetriever(BaseRetriever):
    """Always finds the same documents, in the same order."""

    documents: list[Document]

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return self.documents


def documents_of(passages: Sequence[Passage]) -> list[Document]:
    return [Document(p.text, metadata={"title": p.title}) for p in passages]


def canonical(passages: Sequence[Passage], form: str = TITLED) -> list[str]:
    """The texts that are to be blocks: formatted and stripped; empty ones are left out."""
    texts = (form.format(title=p.title, page_content=p.text).strip() for p in passages)
    return [text for text in texts if text]


def messages_of(history: Sequence[str]) -> list[BaseMessage]:
    return [AIMessage(text) if i % 2 else HumanMessage(text) for i, text in enumerate(history)]


def by_chain(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """Passages in the system message by ``format_blocks``, then a history and the question."""
    inputs = {
        "system": sample.system,
        "context": format_blocks(documents_of(sample.passages), None),
        "history": messages_of(sample.history),
        "input": sample.question,
    }
    (PROMPT | chat).invoke(inputs)
    return [_asked(family, chat, sample, canonical(sample.passages, "{page_content}"))]


def by_stuff_chain(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """The same by ``create_stuff_documents_chain``, with titles."""
    form = BlockDocumentPrompt.from_template(TITLED)
    chain = create_stuff_documents_chain(chat, PROMPT, document_prompt=form)
    chain.invoke(
        {
            "system": sample.system,
            "context": documents_of(sample.passages),
            "history": messages_of(sample.history),
            "input": sample.question,
        }
    )
    return [_asked(family, chat, sample, canonical(sample.passages))]


def by_parts(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """Passages as parts of a message, told by their handle."""
    parts: list[str | dict[Any, Any]] = [
        {"type": "text", "text": text, HANDLE_KEY: "whatever"}
        for text in canonical(sample.passages)
    ]
    last = HumanMessage([*parts, {"type": "text", "text": sample.question}])
    chat.invoke([SystemMessage(sample.system), *messages_of(sample.history), last])
    return [_asked(family, chat, sample, canonical(sample.passages))]


def by_retriever_tool(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """A question, a call of a retriever tool, and what the tool found."""
    tool = create_retriever_tool(
        FixedRetriever(documents=documents_of(sample.passages)),
        "lookup",
        "Looks things up.",
        document_prompt=BlockDocumentPrompt.from_template(TITLED),
    )
    call = _call(sample)
    result: ToolMessage = tool.invoke({**call, "name": "lookup", "args": {"query": "?"}})
    chat.invoke([*_before(sample), AIMessage(sample.answer, tool_calls=[call]), result])
    texts = canonical(sample.passages)
    if family.json_results:
        texts = [in_json(text) for text in texts]
    return [_with_tool(family, chat, sample, texts)]


def by_both(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """Some passages in the system message, with no word beside them, the others by a tool."""
    first, *others = documents_of(sample.passages)
    found = ToolMessage(format_blocks(others), tool_call_id=sample.call_id, name="lookup")
    asked = [HumanMessage(sample.question), AIMessage("", tool_calls=[_call(sample)]), found]
    chat.invoke([SystemMessage(format_blocks([first])), *messages_of(sample.history), *asked])
    by_system = canonical(sample.passages[:1], "{page_content}")
    by_tool = canonical(sample.passages[1:], "{page_content}")
    if family.json_results:
        by_tool = [in_json(text) for text in by_tool]
    # Without words for tools, the result goes before its question, which the history precedes.
    whole = _with_tool(family, chat, sample, [*by_system, *by_tool])
    return [replace(whole, typed=whole.typed[1:])]


def by_tool_result(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """What another tool says is no passage, whatever it looks like; then the user asks again."""
    result = ToolMessage(sample.tool_result, tool_call_id=sample.call_id, name=sample.tool_name)
    chat.invoke([*_before(sample), AIMessage("", tool_calls=[_call(sample)]), result])
    asked = _with_tool(family, chat, sample, [])
    shown = in_json(sample.tool_result) if family.json_results else sample.tool_result
    return [replace(asked, typed=[*asked.typed, shown])]


def _before(sample: Sample) -> list[BaseMessage]:
    asked = HumanMessage(sample.question)
    return [SystemMessage(sample.system), *messages_of(sample.history), asked]


def _call(sample: Sample) -> Any:
    args = {"query": sample.argument, "more": [sample.argument], sample.argument: 1}
    return {"name": sample.tool_name, "args": args, "id": sample.call_id, "type": "tool_call"}


def _typed(family: Family, sample: Sample) -> list[str]:
    return [sample.system, sample.question, *typed_history(family, sample.history)]


def _asked(family: Family, chat: RecordingChat, sample: Sample, texts: list[str]) -> Asked:
    return Asked(
        chat.prompts,
        texts,
        _typed(family, sample),
        [sample.question],
        contents=everything(sample, texts),
        thoughts=thoughts(sample),
    )


def _with_tool(family: Family, chat: RecordingChat, sample: Sample, texts: list[str]) -> Asked:
    typed = _typed(family, sample)
    if family.tools and not family.name.startswith("deepseek"):
        typed += [in_json(sample.argument), sample.tool_name]
    contents = [*everything(sample, texts), sample.argument, sample.argument]
    return Asked(chat.prompts, texts, typed, contents=contents, thoughts=thoughts(sample))


def by_string(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """A prompt that is a string, for the model without chat: nobody's control tokens count."""
    make: Any = BlockAttentionLLM
    llm: BlockAttentionLLM = make(source=chat.source)
    context = format_blocks(documents_of(sample.passages), None)
    form = PromptTemplate.from_template("{system}\n{context}\nQuestion: {question}")
    string = form.format(system=sample.system, context=context, question=sample.question)
    texts = canonical(sample.passages, "{page_content}")
    contents = everything(sample, texts)
    prompts = [llm.to_prompt(string)]
    return [Asked(prompts, texts, [sample.system], [sample.question], contents=contents)]


SCENARIOS: dict[str, Callable[[Family, RecordingChat, Sample], list[Asked]]] = {
    "string": by_string,
    "chain": by_chain,
    "stuff chain": by_stuff_chain,
    "message parts": by_parts,
    "retriever tool": by_retriever_tool,
    "system and tool": by_both,
    "other tool": by_tool_result,
}
