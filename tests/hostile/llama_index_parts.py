"""Hostile conversations through LlamaIndex's own parts: synthesizers and chat engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import llama_index.core
from llama_index.core import Settings
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
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockPromptHelper,
    configure,
)
from blockattn_rag.prompts.blocks import BlockPrompt
from tests.hostile.families import Family
from tests.hostile.judge import Asked
from tests.hostile.texts import Passage, Sample
from tests.models import shared_tiny_llama

LARGE, SMALL = 200_000, 1_400
MODES = ("compact", "refine", "tree_summarize", "simple_summarize", "accumulate")


class RecordingLLM(BlockAttentionLLM):
    """Keeps the prompts that it is asked, and answers what it was told to."""

    _prompts: list[BlockPrompt] = PrivateAttr(default_factory=list)
    _reply: str = PrivateAttr(default="")

    def told(self, reply: str) -> RecordingLLM:
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


def recording_llm(family: Family, **fields: Any) -> RecordingLLM:
    """An LLM of the family that never runs its model."""
    fields = {"context_window": LARGE, "max_new_tokens": 16} | fields
    make: Any = RecordingLLM
    llm: RecordingLLM = make(
        shared_tiny_llama(), model_kwargs={"tokenizer": family.tokenizer}, **fields
    )
    return llm


@contextmanager
def settings_of(llm: BlockAttentionLLM, *, configured: bool) -> Iterator[None]:
    """LlamaIndex's global settings, as ``configure`` leaves them or untouched, for a while."""
    names = ("_llm", "_prompt_helper", "_tokenizer")
    before = {name: getattr(Settings, name) for name in names}
    tokenizer = llama_index.core.global_tokenizer
    try:
        for name in names:
            setattr(Settings, name, None)
        llama_index.core.global_tokenizer = None
        if configured:
            configure(llm)
        yield
    finally:
        for name, value in before.items():
            setattr(Settings, name, value)
        llama_index.core.global_tokenizer = tokenizer


class FixedRetriever(BaseRetriever):
    """Always finds the same nodes, in the same order."""

    def __init__(self, nodes: Sequence[TextNode]) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self._nodes]


def nodes_of(passages: Sequence[Passage]) -> list[TextNode]:
    return [
        TextNode(text=p.text, id_=f"p{i}", metadata={"title": p.title} if p.title else {})
        for i, p in enumerate(passages)
    ]


def canonical(nodes: Sequence[TextNode]) -> list[str]:
    """The texts that are to be blocks: what the LLM sees of a node; empty ones are left out."""
    texts = (node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes)
    return [text for text in texts if text]


def as_in_list(texts: list[str]) -> list[str]:
    """Texts as ``str`` of a list shows them: stock ``simple_summarize`` puts a list in its prompt.

    Quotes are escaped where both kinds are in the list.
    """
    whole = "".join(texts)
    extra = "'\"" if "'" in whole and '"' in whole else "'" if "'" in whole else ""
    shown = len(repr(extra)) - 2 if extra else 0
    return [repr(text + extra)[1 : -1 - shown] for text in texts]


def chat_history(sample: Sample) -> list[ChatMessage]:
    roles = (MessageRole.USER, MessageRole.ASSISTANT)
    return [ChatMessage(role=roles[i % 2], content=text) for i, text in enumerate(sample.history)]


def typed_history(family: Family, history: Sequence[str]) -> list[str]:
    """What of a history must reach the model: of answers, perhaps no thinking."""
    return [
        text.rpartition("</think>")[2] if i % 2 and family.hides_thinking else text
        for i, text in enumerate(history)
    ]


def everything(sample: Sample, passages: Sequence[str]) -> list[str]:
    fixed = (sample.system, sample.question, sample.answer, sample.argument, sample.tool_name)
    return [*fixed, sample.tool_result, *sample.history, *passages]


def in_json(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def thoughts(sample: Sample) -> int:
    return sum("</think>" in text for text in (*sample.history, sample.answer))


def by_synthesizer(mode: str) -> Callable[[Family, RecordingLLM, Sample], list[Asked]]:
    """The passages and the question by a response synthesizer; refine quotes earlier answers."""

    def ask(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
        llm.told(sample.answer)
        nodes = nodes_of(sample.passages)
        found = FixedRetriever(nodes).retrieve("?")
        marked = BlockKVPostprocessor().postprocess_nodes(found)
        synthesizer: Any = get_response_synthesizer(llm, response_mode=ResponseMode(mode))
        synthesizer.synthesize(QueryBundle(sample.question), marked)
        texts = canonical(nodes)
        if mode == "simple_summarize" and not isinstance(
            Settings._prompt_helper, BlockPromptHelper
        ):
            texts = as_in_list(texts)
        # Stock refine asks once for every node, with or without text.
        if mode in ("refine", "accumulate") and len(texts) < len(nodes):
            return []
        contents = everything(sample, texts)
        return [Asked(llm.prompts, texts, [sample.question], [sample.question], contents=contents)]

    return ask


def by_chat_engine(kind: type[Any]) -> Callable[[Family, RecordingLLM, Sample], list[Asked]]:
    """The question after a history, by a chat engine with a retriever."""

    def ask(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
        llm.told(sample.answer)
        nodes = nodes_of(sample.passages)
        memory = ChatMemoryBuffer.from_defaults(
            chat_history=chat_history(sample), llm=llm, token_limit=10**6
        )
        engine = kind.from_defaults(
            FixedRetriever(nodes),
            llm=llm,
            memory=memory,
            system_prompt=sample.system,
            node_postprocessors=[BlockKVPostprocessor()],
        )
        engine.chat(sample.question)
        texts = canonical(nodes)
        if not texts:
            return []
        contents = everything(sample, texts)
        history = typed_history(family, sample.history)
        common: dict[str, Any] = {"contents": contents, "thoughts": thoughts(sample)}
        condensing, last = llm.prompts[:-1], llm.prompts[-1:]
        asked = [Asked(last, texts, [sample.system, *history], **common)]
        if not condensing:
            return [*asked, Asked(last, texts, in_final=[sample.question], **common)]
        # To condense, the model is told the whole history in one message; it answers the question.
        told = [*sample.history, sample.question]
        return [*asked, Asked(condensing, [], told, [sample.question], **common)]

    return ask


def by_messages(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
    """Messages made by hand, with the LLM's view of marked nodes in the last one."""
    llm.told(sample.answer)
    nodes = nodes_of(sample.passages)
    marked = BlockKVPostprocessor().postprocess_nodes(FixedRetriever(nodes).retrieve("?"))
    views = [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in marked]
    context = "\n\n".join(view for view in views if view)
    last = f"Context:\n{context}\n\nQuestion: {sample.question}"
    llm.chat(
        [
            ChatMessage(role=MessageRole.SYSTEM, content=sample.system),
            *chat_history(sample),
            ChatMessage(role=MessageRole.USER, content=last),
        ]
    )
    texts = canonical(nodes)
    typed = [sample.system, *typed_history(family, sample.history)]
    return [
        Asked(
            llm.prompts,
            texts,
            typed,
            [sample.question],
            contents=everything(sample, texts),
            thoughts=thoughts(sample),
        )
    ]


def by_completion(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
    """A text for ``complete``, which a chat model gets as one message of the user."""
    llm.told(sample.answer)
    nodes = nodes_of(sample.passages)
    marked = BlockKVPostprocessor().postprocess_nodes(FixedRetriever(nodes).retrieve("?"))
    views = [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in marked]
    llm.complete("\n\n".join([*views, sample.question]))
    texts = canonical(nodes)
    contents = everything(sample, texts)
    return [Asked(llm.prompts, texts, [], [sample.question], contents=contents)]


def by_tool_message(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
    """Marked nodes in the message of a tool, in families whose templates take one as it is."""
    if not family.tools or family.name == "mistral":
        return []
    llm.told("")
    nodes = nodes_of(sample.passages)
    marked = BlockKVPostprocessor().postprocess_nodes(FixedRetriever(nodes).retrieve("?"))
    views = [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in marked]
    result = "\n\n".join(view for view in views if view)
    turns = [(MessageRole.USER, sample.question), (MessageRole.ASSISTANT, sample.answer)]
    turns += [(MessageRole.TOOL, f"{sample.tool_result}\n{result}")]
    llm.chat([*chat_history(sample), *(ChatMessage(role=r, content=text) for r, text in turns)])
    texts, shown = canonical(nodes), sample.tool_result.strip()
    if family.json_results:
        texts, shown = [in_json(text) for text in texts], in_json(shown)
    typed = [sample.question, *typed_history(family, [*sample.history, "", sample.answer]), shown]
    contents = everything(sample, texts)
    return [Asked(llm.prompts, texts, typed, contents=contents, thoughts=thoughts(sample))]


SCENARIOS: dict[str, Callable[[Family, RecordingLLM, Sample], list[Asked]]] = {
    "messages": by_messages,
    "completion": by_completion,
    "tool message": by_tool_message,
    **{mode: by_synthesizer(mode) for mode in MODES},
    "context chat": by_chat_engine(ContextChatEngine),
    "condensing chat": by_chat_engine(CondensePlusContextChatEngine),
}


def by_cutting(mode: str) -> Callable[[Family, RecordingLLM, Sample], list[Asked]]:
    """Passages that are longer than the window, by a synthesizer that must cut them."""

    def ask(family: Family, llm: RecordingLLM, sample: Sample) -> list[Asked]:
        [asked] = by_synthesizer(mode)(family, llm, replace(sample, question="What?", answer="So."))
        return [replace(asked, cut=True)]

    return ask


def own_template(family: Family) -> Callable[[Sequence[ChatMessage]], str]:
    """A ``messages_to_prompt`` as users write them, with two control tokens."""
    opening, closing = family.controls[-2:]

    def to_prompt(messages: Sequence[ChatMessage]) -> str:
        turns = (f"{opening}{m.role.value}\n{m.content}{closing}\n" for m in messages)
        return "".join([*turns, f"{opening}assistant\n"])

    return to_prompt


def within_settings(
    ask: Callable[[Family, Any, Sample], list[Asked]], *, configured: bool
) -> Callable[[Family, Any, Sample], list[Asked]]:
    """The same with LlamaIndex's settings configured for the model, or untouched."""

    def asked(family: Family, llm: Any, sample: Sample) -> list[Asked]:
        with settings_of(llm, configured=configured):
            return ask(family, llm, sample)

    return asked
