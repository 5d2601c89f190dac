"""Hostile conversations sent through LangChain's prompts, chains and tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool
from pydantic import PrivateAttr

from blockattn_rag.langchain import (
    HANDLE_KEY,
    BlockDocumentPrompt,
    ChatBlockAttention,
    format_blocks,
)
from blockattn_rag.prompts.blocks import BlockPrompt
from tests.hostile.families import Family, in_json
from tests.hostile.judge import Asked
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
    """Chat model that records its prompts and returns empty answers."""

    _prompts: list[BlockPrompt] = PrivateAttr(default_factory=list)

    @property
    def prompts(self) -> list[BlockPrompt]:
        """Return and clear the recorded prompts."""
        prompts = list(self._prompts)
        self._prompts.clear()
        return prompts

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self._prompts.append(self.to_prompt(messages))
        return ChatResult(generations=[ChatGeneration(message=AIMessage(""))])


def recording_chat(family: Family, **fields: Any) -> RecordingChat:
    """Return a chat model with the family's tokenizer that never runs a model."""
    make: Any = RecordingChat
    chat: RecordingChat = make(
        model=shared_tiny_llama(), model_kwargs={"tokenizer": family.tokenizer}, **fields
    )
    return chat


class FixedRetriever(BaseRetriever):
    """Retriever that always returns the same documents in the same order."""

    documents: list[Document]

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return self.documents


def documents_of(passages: Sequence[Passage]) -> list[Document]:
    return [Document(p.text, metadata={"title": p.title}) for p in passages]


def canonical(passages: Sequence[Passage], form: str = TITLED) -> list[str]:
    """Return the texts that must be blocks: formatted, stripped and not empty."""
    texts = (form.format(title=p.title, page_content=p.text).strip() for p in passages)
    return [text for text in texts if text]


def messages_of(history: Sequence[str]) -> list[BaseMessage]:
    return [AIMessage(text) if i % 2 else HumanMessage(text) for i, text in enumerate(history)]


def by_chain(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """Put passages with titles into the system message with ``create_stuff_documents_chain``."""
    form = BlockDocumentPrompt.from_template(TITLED)
    create_stuff_documents_chain(chat, PROMPT, document_prompt=form).invoke(
        {
            "system": sample.system,
            "context": documents_of(sample.passages),
            "history": messages_of(sample.history),
            "input": sample.question,
        }
    )
    return [_asked(family, chat, sample)]


def by_parts(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """Send passages as parts of a message, each with its handle."""
    parts: list[str | dict[Any, Any]] = [
        {"type": "text", "text": text, HANDLE_KEY: "whatever"}
        for text in canonical(sample.passages)
    ]
    *before, _ = _before(sample)
    chat.invoke([*before, HumanMessage([*parts, {"type": "text", "text": sample.question}])])
    return [_asked(family, chat, sample)]


def by_retriever_tool(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """Send a question, a call of a retriever tool, and its result."""
    tool = create_retriever_tool(
        FixedRetriever(documents=documents_of(sample.passages)),
        "lookup",
        "Looks things up.",
        document_prompt=BlockDocumentPrompt.from_template(TITLED),
    )
    call = _call(sample)
    result: ToolMessage = tool.invoke({**call, "name": "lookup", "args": {"query": "?"}})
    chat.invoke([*_before(sample), AIMessage(sample.answer, tool_calls=[call]), result])
    return [_with_tool(family, chat, sample, family.results(canonical(sample.passages)))]


def by_both(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """Send one passage as the system message and the others as the result of a tool."""
    first, *others = documents_of(sample.passages)
    found = ToolMessage(format_blocks(others), tool_call_id=sample.call_id, name="lookup")
    _, *asked = _before(sample)
    call = AIMessage("", tool_calls=[_call(sample)])
    chat.invoke([SystemMessage(format_blocks([first])), *asked, call, found])
    by_system, by_tool = (
        canonical(passages, "{page_content}")
        for passages in (sample.passages[:1], sample.passages[1:])
    )
    return [_with_tool(family, chat, sample, by_system + family.results(by_tool), system=False)]


def by_tool_result(family: Family, chat: RecordingChat, sample: Sample) -> list[Asked]:
    """Send the result of another tool, which is never a passage, whatever it contains."""
    result = ToolMessage(sample.tool_result, tool_call_id=sample.call_id, name=sample.tool_name)
    chat.invoke([*_before(sample), AIMessage("", tool_calls=[_call(sample)]), result])
    return [_with_tool(family, chat, sample, [], family.results([sample.tool_result]))]


def _before(sample: Sample) -> list[BaseMessage]:
    asked = HumanMessage(sample.question)
    return [SystemMessage(sample.system), *messages_of(sample.history), asked]


def _call(sample: Sample) -> Any:
    args = {"query": sample.argument, "more": [sample.argument], sample.argument: 1}
    return {"name": sample.tool_name, "args": args, "id": sample.call_id, "type": "tool_call"}


def _asked(family: Family, chat: RecordingChat, sample: Sample) -> Asked:
    typed = [sample.system, *family.typed(sample.history)]
    texts, final = canonical(sample.passages), [sample.question]
    return Asked(chat.prompts, texts, typed, final, sample=sample, thoughts=sample.thoughts)


def _with_tool(
    family: Family,
    chat: RecordingChat,
    sample: Sample,
    texts: list[str],
    results: Sequence[str] = (),
    *,
    system: bool = True,
) -> Asked:
    typed = [*([sample.system] if system else []), sample.question, *family.typed(sample.history)]
    if family.tools and not family.name.startswith("deepseek"):
        typed += [in_json(sample.argument), sample.tool_name]
    typed += results
    return Asked(chat.prompts, texts, typed, sample=sample, thoughts=sample.thoughts)


SCENARIOS: dict[str, Callable[[Family, RecordingChat, Sample], list[Asked]]] = {
    "chain": by_chain,
    "message parts": by_parts,
    "retriever tool": by_retriever_tool,
    "system and tool": by_both,
    "other tool": by_tool_result,
}
