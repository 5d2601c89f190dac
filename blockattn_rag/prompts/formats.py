"""Prompt formats as data: how a question and its passages become a prompt.

A prompt format says what stands before the passages, around each of them, and after them. The text
before the first passage is block 0, each passage is a block, and the rest is the final block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockattn_rag.prompts.blocks import BlockPrompt, BlockTemplate, Span
from blockattn_rag.prompts.chat_template import Message, chat_spans, has_chat_template, render_chat

_SENTINEL = "\u241e answer \u241e"


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved passage. ``title`` may be empty."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a question and its passages become a prompt.

    Args:
        name: what the command line calls it.
        system: the system message; empty for none.
        before: text before the first passage, in the user's message.
        titled: canonical text of a passage with a title, with ``{title}`` and ``{text}``.
        template: what stands before and after each canonical text.
        after: text after the last passage, with ``{question}``.
    """

    name: str
    system: str
    before: str
    titled: str
    template: BlockTemplate
    after: str

    def canonical_text(self, passage: Passage) -> str:
        """The text that a passage's handle names."""
        if not passage.title:
            return passage.text.strip()
        return self.titled.format(title=passage.title, text=passage.text).strip()

    def prompt(self, question: str, passages: Sequence[Passage], tokenizer: Any) -> BlockPrompt:
        """The prompt up to where the answer starts, in ``tokenizer``'s chat template if any."""
        user = (
            Span(self.before, "system"),  # the same for every question
            *(Span(self.canonical_text(passage), "passage") for passage in passages),
            Span(self.after.format(question=question), "conversation"),
        )
        if not has_chat_template(tokenizer):
            head = f"{self.system}\n\n" if self.system else ""
            return BlockPrompt.from_spans((Span(head, "system"), *user), self.template)
        messages: list[Message] = [{"role": "user", "content": user}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return BlockPrompt.from_spans(chat_spans(tokenizer, messages), self.template)


def follow_up(question: str, tokenizer: Any) -> tuple[Span, ...]:
    """Text between the end of one answer and the start of the next one, asking ``question``."""
    if not has_chat_template(tokenizer):
        return (Span(f"\n\nQuestion: {question}\nAnswer: ", "conversation"),)
    answer = (Span(_SENTINEL, "prompt"),)
    messages: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question},
    ]
    spans = chat_spans(tokenizer, messages)
    return spans[spans.index(answer[0]) + 1 :]


def answer_end(tokenizer: Any) -> str:
    """What closes an answer and so must be learned after it: the end-of-turn or EOS token."""
    eos = str(tokenizer.eos_token or "")
    if not has_chat_template(tokenizer):
        return eos
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
    rest = render_chat(tokenizer, messages, add_generation_prompt=False).partition(_SENTINEL)[2]
    return rest.rstrip() or eos


# LlamaIndex joins passages with a blank line; the separator belongs to the passage's block.
BLANK_LINE = BlockTemplate(after="\n\n")

CHAT = PromptFormat(
    # The words of LlamaIndex's CHAT_TEXT_QA_PROMPT, so that both share their blocks.
    name="chat",
    system=(
        "You are an expert Q&A system that is trusted around the world.\n"
        "Always answer the query using the provided context information, and not prior knowledge.\n"
        "Some rules to follow:\n"
        "1. Never directly reference the given context in your answer.\n"
        "2. Avoid statements like 'Based on the context, ...' or 'The context information ...' or "
        "anything along those lines."
    ),
    before="Context information is below.\n---------------------\n",
    titled="title: {title}\n\n{text}",
    template=BLANK_LINE,
    after=(
        "\n---------------------\nGiven the context information and not prior knowledge, "
        "answer the query.\nQuery: {question}\nAnswer: "
    ),
)

BLOCK_ATTENTION = PromptFormat(
    # Block-Attention for Efficient Prefilling (2409.15355), RAG prompt of the released code.
    name="block-attention",
    system="",
    before=(
        "You are an intelligent AI assistant. Please answer questions based on the user's "
        "instructions. Below are some reference documents that may help you in answering the "
        "user's question.\n\n"
    ),
    titled="Title: {title}\n{text}",
    template=BlockTemplate(before="- ", after="\n"),
    after=(
        "\n\nPlease write a high-quality answer for the given question using only the provided "
        "search documents (some of which might be irrelevant).\nQuestion: {question}"
    ),
)

TURBORAG = PromptFormat(
    # TurboRAG (2410.07590), released code; its misspelt "Questuin:" is not kept.
    name="turborag",
    system=(
        "You are an accurate and reliable AI assistant that can answer questions with the help of "
        "external documents. Please note that external documents may contain noisy information. "
        "If the information in the document contains the correct answer, you will give an accurate "
        "answer. If the information in the document does not contain the answer, you will generate "
        "'I can not answer the question because of the insufficient information in documents.'."
    ),
    before="Docs:",
    titled="{title}\n{text}",
    template=BlockTemplate(before="<|doc_start|>", after="<|doc_end|>"),
    after="\n\nQuestion: {question}",
)

FORMATS: dict[str, PromptFormat] = {f.name: f for f in (CHAT, BLOCK_ATTENTION, TURBORAG)}


def prompt_format(name: str | PromptFormat) -> PromptFormat:
    """The format of that name."""
    if isinstance(name, PromptFormat):
        return name
    if name not in FORMATS:
        raise ValueError(f"unknown prompt format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]
