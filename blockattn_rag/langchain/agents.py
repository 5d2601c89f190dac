"""Agents with cached passages: a retrieval tool, and retrieval before the first model call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool
from pydantic import BaseModel, Field

from blockattn_rag.langchain.documents import as_block_prompt, format_blocks
from blockattn_rag.output.tool_formats import new_call_id
from blockattn_rag.prompts.markers import strip_markers

NOTHING_FOUND = "Nothing was found."
"""Tool result if the retriever finds nothing."""

_CONDENSE = (
    "Given the conversation below, rephrase the follow-up question as one question that can be "
    "understood without it, in the same language. Answer with that question alone.\n\n"
    "{history}\n\nFollow-up question: {question}\nStandalone question:"
)

# LangGraph streams the tokens of all models in an agent, except models with this tag. Condensed
# questions are not part of the answer, so they must not be streamed.
_UNSEEN = RunnableConfig(tags=["nostream"])

_RETRIEVAL = "blockattn_rag_retrieval"
"""Key in ``additional_kwargs`` that identifies the calls added by ``RetrieveFirst``."""


class _Query(BaseModel):
    query: str = Field(description="What to look up, as a question or keywords.")


def _check_runnable(source: Any, what: str, hint: str) -> None:
    if not hasattr(source, "invoke"):
        raise TypeError(f"Expected {what}, found {type(source).__name__}; pass {hint}")


def _lookups(retriever: BaseRetriever, document_prompt: BasePromptTemplate[str] | None) -> Any:
    """Create a sync and an async function that return marked passages, and their documents."""
    _check_runnable(retriever, "a retriever", "a vector store's as_retriever()")
    prompt = as_block_prompt(document_prompt)

    def shown(documents: Sequence[Document]) -> tuple[str, list[Document]]:
        text = format_blocks(documents, prompt) or NOTHING_FOUND
        return text, [prompt.stamp(document) for document in documents]

    def look_up(query: str) -> tuple[str, list[Document]]:
        return shown(retriever.invoke(query))

    async def alook_up(query: str) -> tuple[str, list[Document]]:
        return shown(await retriever.ainvoke(query))

    return look_up, alook_up


def block_retriever_tool(
    retriever: BaseRetriever,
    name: str,
    description: str,
    *,
    document_prompt: BasePromptTemplate[str] | None = None,
) -> BaseTool:
    """Create a retrieval tool for agents and graphs whose model reuses passages.

    Like LangChain's ``create_retriever_tool``, but with block markers around passages, so that they
    stay blocks in later turns and in other prompts of a graph. The ``artifact`` of the tool message
    contains the documents with their handles. Remove the markers for other models and user
    interfaces (``without_markers``).

    Args:
        retriever: Retriever of the passages.
        name: Name of the tool.
        description: Description of the tool, for the model.
        document_prompt: Prompt that formats a document, as in ``BlockKVTransformer``. Default: the
            document's ``page_content``.

    Raises:
        TypeError: ``retriever`` has no ``invoke`` method: it is, for example, a vector store.
    """
    look_up, alook_up = _lookups(retriever, document_prompt)
    return StructuredTool(
        name=name,
        description=description,
        func=look_up,
        coroutine=alook_up,
        args_schema=_Query,
        response_format="content_and_artifact",
    )


class RetrieveFirst(AgentMiddleware[Any, Any]):
    """Agent middleware that retrieves passages for each question before calling the model.

    Use it for models that cannot call tools, and for questions that always need passages. The
    retrieval is added to the agent's messages as a tool call with its result, whose ``artifact``
    contains the documents. Later turns reuse the passages.

    Args:
        retriever: Retriever of the passages.
        as_tool_call: Whether the prompt contains the retrieval as a tool call with its result.
            Small models may imitate the call instead of answering. Default: the passages are
            inserted at the start of the user's message, without a call.
        name: Name of the tool in the agent's messages.
        document_prompt: See ``block_retriever_tool``.
        condense: Chat model that rewrites follow-up questions as standalone questions. Default:
            questions are looked up unchanged.

    Raises:
        TypeError: ``retriever`` is not a retriever, or ``condense`` is not a chat model.

    Example::

        agent = create_agent(chat, [], middleware=[RetrieveFirst(retriever, condense=chat)])
        agent.invoke({"messages": [("human", "Where is Lake Bon?")]})
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        *,
        as_tool_call: bool = False,
        name: str = "retrieve",
        document_prompt: BasePromptTemplate[str] | None = None,
        condense: BaseChatModel | None = None,
    ) -> None:
        super().__init__()
        self.tools = []
        self._look_up, self._alook_up = _lookups(retriever, document_prompt)
        self._as_tool_call, self._tool_name = as_tool_call, name
        if condense is not None:
            hint = "an object such as ChatBlockAttention"
            _check_runnable(condense, "a chat model for condense", hint)
        self._condense = condense

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Retrieve passages if the last message is the user's. Returns the messages to add."""
        if (question := _question(state["messages"])) is None:
            return None
        if self._condense and (prompt := _condensing(state["messages"], question)):
            question = self._condense.invoke(prompt, _UNSEEN).text.strip() or question
        return self._messages(question, *self._look_up(question))

    async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if (question := _question(state["messages"])) is None:
            return None
        if self._condense and (prompt := _condensing(state["messages"], question)):
            question = (await self._condense.ainvoke(prompt, _UNSEEN)).text.strip() or question
        return self._messages(question, *await self._alook_up(question))

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Call the model with the retrievals in the format selected by ``as_tool_call``."""
        return handler(self._shown(request))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await handler(self._shown(request))

    def _shown(self, request: Any) -> Any:
        if self._as_tool_call:
            return request
        return request.override(messages=_with_passages(request.messages))

    def _messages(self, query: str, text: str, documents: list[Document]) -> dict[str, Any]:
        call_id, name = new_call_id(), self._tool_name
        call = {"name": name, "args": {"query": query}, "id": call_id, "type": "tool_call"}
        retrieval = ToolMessage(text, name=name, tool_call_id=call_id, artifact=documents)
        asked = AIMessage("", tool_calls=[call], additional_kwargs={_RETRIEVAL: True})
        return {"messages": [asked, retrieval]}


def _with_passages(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Replace the calls of ``RetrieveFirst`` with passages in the preceding user message."""
    shown: list[BaseMessage] = []
    calls: set[str | None] = set()
    for message in messages:
        if isinstance(message, AIMessage) and _RETRIEVAL in message.additional_kwargs:
            calls |= {call["id"] for call in message.tool_calls}
        elif isinstance(message, ToolMessage) and message.tool_call_id in calls:
            # The question may be missing, for example because another middleware removed it.
            question = shown.pop() if shown and isinstance(shown[-1], HumanMessage) else None
            shown.append(_message_with(message.text, question))
        else:
            shown.append(message)
    return shown


def _message_with(passages: str, question: BaseMessage | None) -> BaseMessage:
    """Put the question after its passages, because it must be in the final block."""
    if question is None:
        return HumanMessage(passages)
    before, content = f"{passages}\n\n", question.content
    if isinstance(content, str):
        return question.model_copy(update={"content": before + content})
    return question.model_copy(update={"content": [{"type": "text", "text": before}, *content]})


def _question(messages: Sequence[BaseMessage]) -> str | None:
    """Return the text of the last message, or None if it is empty or not the user's."""
    last = messages[-1] if messages else None
    text = last.text if isinstance(last, HumanMessage) else ""
    return text if text.strip() else None


def _condensing(messages: Sequence[BaseMessage], question: str) -> str | None:
    """Return the prompt that condenses a follow-up question. None if there is no history."""
    history = "\n".join(filter(None, map(_line, messages[:-1])))
    return _CONDENSE.format(history=history, question=question) if history else None


def _line(message: BaseMessage) -> str:
    text = strip_markers(message.text).strip()
    if isinstance(message, HumanMessage):
        return f"Human: {text}"
    return f"Assistant: {text}" if isinstance(message, AIMessage) and text else ""
