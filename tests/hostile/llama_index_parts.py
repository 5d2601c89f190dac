"""Hostile conversations sent through LlamaIndex's synthesizers and chat engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVPostprocessor
from blockattn_rag.prompts.blocks import BlockPrompt
from tests.hostile.families import Family
from tests.hostile.judge import Asked
from tests.hostile.texts import Passage, Sample
from tests.llama_index.conftest import Fixed
from tests.models import shared_tiny_llama

MODES = ("compact", "refine", "tree_summarize")


class RecordingLLM(BlockAttentionLLM):
    """LLM that records its prompts and returns a fixed answer."""

    _prompts: list[BlockPrompt] = PrivateAttr(default_factory=list)
    _reply: str = PrivateAttr(default="")

    def answering(self, reply: str) -> RecordingLLM:
        self._reply = reply
        self._prompts.clear()
        return self

    @property
    def prompts(self) -> list[BlockPrompt]:
        return list(self._prompts)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self._prompts.append(self.to_prompt(prompt, formatted))
        return CompletionResponse(text=self._reply)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        self._prompts.append(self.to_prompt(messages))
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=self._reply))


Ask: TypeAlias = Callable[[Family, RecordingLLM, Sample], list[Asked]]


def recording_llm(family: Family, **fields: Any) -> RecordingLLM:
    """Return an LLM with the family's tokenizer that never runs a model."""
    fields = {"context_window": 200_000, "max_new_tokens": 16} | fields
    make: Any = RecordingLLM
    llm: RecordingLLM = make(
        shared_tiny_llama(), model_kwargs={"tokenizer": family.tokenizer}, **fields
    )
    return llm


def nodes_of(passages: Sequence[Passage]) -> list[TextNode]:
    return [
        TextNode(text=p.text, id_=f"p{i}", metadata={"title": p.title} if p.title else {})
        for i, p in enumerate(passages)
    ]


def canonical(nodes: Sequence[TextNode]) -> list[str]:
    """Return the texts that must be blocks: the non-empty LLM views of the nodes."""
    texts = (node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes)
    return [text for text in texts if text]


def marked(nodes: Sequence[TextNode]) -> list[NodeWithScore]:
    return BlockKVPostprocessor().postprocess_nodes(Fixed(nodes).retrieve("?"))


def context_of(nodes: Sequence[TextNode]) -> str:
    """Return the LLM views of the marked nodes as one string."""
    views = [one.node.get_content(metadata_mode=MetadataMode.LLM) for one in marked(nodes)]
    return "\n\n".join(view for view in views if view)


def chat_history(sample: Sample) -> list[ChatMessage]:
    roles = (MessageRole.USER, MessageRole.ASSISTANT)
    return [ChatMessage(role=roles[i % 2], content=text) for i, text in enumerate(sample.history)]


def by_synthesizer(mode: str) -> Ask:
    """Send passages and question through a response synthesizer. Refine quotes earlier answers."""

    def ask(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
        nodes = nodes_of(sample.passages)
        synthesizer: Any = get_response_synthesizer(
            llm.answering(sample.answer), response_mode=ResponseMode(mode)
        )
        synthesizer.synthesize(QueryBundle(sample.question), marked(nodes))
        texts, question = canonical(nodes), [sample.question]
        # LlamaIndex's refine sends one prompt per node, even without text.
        if mode == "refine" and len(texts) < len(nodes):
            return []
        return [Asked(llm.prompts, texts, question, question, sample=sample)]

    return ask


def by_chat_engine(kind: type[Any]) -> Ask:
    """Ask a question after a history, through a chat engine with a retriever."""

    def ask(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
        nodes = nodes_of(sample.passages)
        if not (texts := canonical(nodes)):
            return []
        memory = ChatMemoryBuffer.from_defaults(
            chat_history=chat_history(sample), llm=llm, token_limit=10**6
        )
        engine = kind.from_defaults(
            Fixed(nodes), llm=llm.answering(sample.answer), memory=memory,
            system_prompt=sample.system, node_postprocessors=[BlockKVPostprocessor()],
        )  # fmt: skip
        engine.chat(sample.question)
        common: Any = {"sample": sample, "thoughts": sample.thoughts}
        condensing, last = llm.prompts[:-1], llm.prompts[-1:]
        asked = [Asked(last, texts, [sample.system, *family.typed(sample.history)], **common)]
        if not condensing:
            return [*asked, Asked(last, texts, in_final=[sample.question], **common)]
        # The condensing prompt contains the whole history; the second prompt contains the question.
        history = [*sample.history, sample.question]
        return [*asked, Asked(condensing, [], history, [sample.question], **common)]

    return ask


def by_messages(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
    """Send hand-written messages with the context in the last one."""
    nodes = nodes_of(sample.passages)
    last = f"Context:\n{context_of(nodes)}\n\nQuestion: {sample.question}"
    llm.answering(sample.answer).chat(
        [
            ChatMessage(role=MessageRole.SYSTEM, content=sample.system),
            *chat_history(sample),
            ChatMessage(role=MessageRole.USER, content=last),
        ]
    )
    typed, final = [sample.system, *family.typed(sample.history)], [sample.question]
    return [
        Asked(llm.prompts, canonical(nodes), typed, final, sample=sample, thoughts=sample.thoughts)
    ]


def by_completion(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
    """Send a text to ``complete``, which chat models receive as one user message."""
    nodes = nodes_of(sample.passages)
    llm.answering(sample.answer).complete(f"{context_of(nodes)}\n\n{sample.question}")
    return [Asked(llm.prompts, canonical(nodes), [], [sample.question], sample=sample)]


def by_tool_message(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
    """Send marked nodes as a tool message, to families whose templates do not alter it."""
    if not family.tools or family.name == "mistral":
        return []
    nodes = nodes_of(sample.passages)
    result = f"{sample.tool_result}\n{context_of(nodes)}"
    turns = [(MessageRole.USER, sample.question), (MessageRole.ASSISTANT, sample.answer)]
    turns += [(MessageRole.TOOL, result)]
    llm.answering("").chat(
        [*chat_history(sample), *(ChatMessage(role=role, content=text) for role, text in turns)]
    )
    said = family.typed([*sample.history, "", sample.answer])
    typed = [sample.question, *said, *family.results([sample.tool_result.strip()])]
    texts = family.results(canonical(nodes))
    return [Asked(llm.prompts, texts, typed, sample=sample, thoughts=sample.thoughts)]


SCENARIOS: dict[str, Ask] = {
    "messages": by_messages,
    "completion": by_completion,
    "tool message": by_tool_message,
    **{mode: by_synthesizer(mode) for mode in MODES},
    "context chat": by_chat_engine(ContextChatEngine),
    "condensing chat": by_chat_engine(CondensePlusContextChatEngine),
}


def own_template(family: Family) -> Callable[[Sequence[ChatMessage]], str]:
    """Typical ``messages_to_prompt`` function of a user, with two control tokens."""
    opening, closing = family.controls[-2:]

    def to_prompt(messages: Sequence[ChatMessage]) -> str:
        turns = (f"{opening}{m.role.value}\n{m.content}{closing}\n" for m in messages)
        return "".join([*turns, f"{opening}assistant\n"])

    return to_prompt
