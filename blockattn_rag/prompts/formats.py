"""Prompt formats, which turn a question and passages into a prompt.

A prompt format defines the text before the passages, around each passage, and after them. The text
before the first passage is the first block, each passage is a block, and the text after the last
passage is the final block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockattn_rag.prompts.blocks import BlockPrompt, BlockTemplate, Span, merged
from blockattn_rag.prompts.chat_template import Message, chat_spans, has_chat_template, render_chat

_SENTINEL = "\u241e answer \u241e"


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved passage. ``title`` may be empty."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A prompt format's control text, which replaces the tokenizer's chat template.

    Args:
        start: Text before everything else.
        turn: Text at the start of the final block.
        answer: Text between the question and the answer.
    """

    start: str
    turn: str
    answer: str


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Format of prompts with a question and passages.

    Args:
        name: Name for ``prompt_format``, such as ``"chat"``.
        system: System message. Empty: none.
        before: Text before the first passage, in the same message.
        titled: Canonical text of a passage with a title, with ``{title}`` and ``{text}``.
        template: Text before and after each canonical text.
        after: Text after the last passage, with ``{question}``.
        frame: Control text that replaces the tokenizer's chat template. Default: none.
    """

    name: str
    system: str
    before: str
    titled: str
    template: BlockTemplate
    after: str
    frame: Frame | None = None

    def canonical_text(self, passage: Passage) -> str:
        """Text of a passage's block, without the template. Its digest is the handle."""
        if not passage.title:
            return passage.text.strip()
        return self.titled.format(title=passage.title, text=passage.text).strip()

    def prompt(self, question: str, passages: Sequence[Passage], tokenizer: Any) -> BlockPrompt:
        """Create a prompt up to the start of the answer.

        Control text comes from the format's frame, or from the tokenizer's chat template. Without
        either, the prompt has no control text.
        """
        user = self.user_spans([Span(question, "conversation")], passages)
        if frame := self.frame:
            *context, after = user
            parts = (frame.start, frame.turn, frame.answer)
            start, turn, answer = (Span(text, "template") for text in parts)
            spans: tuple[Span, ...] = (start, *context, turn, after, answer)
        elif has_chat_template(tokenizer):
            messages: list[Message] = [{"role": "user", "content": user}]
            if self.system:
                messages.insert(0, {"role": "system", "content": self.system})
            spans = chat_spans(tokenizer, messages)
        else:
            spans = (Span(f"{self.system}\n\n" if self.system else "", "system"), *user)
        return BlockPrompt.from_spans(spans, self.template)

    def user_spans(self, question: Sequence[Span], passages: Sequence[Passage]) -> tuple[Span, ...]:
        """Create the user's message: ``before``, the passages, and ``after`` with the question."""
        before, _, after = self.after.partition("{question}")
        return (
            Span(self.before, "system"),  # This text is the same for every question.
            *(Span(self.canonical_text(passage), "passage") for passage in passages),
            *merged([Span(before, "conversation"), *question, Span(after, "conversation")]),
        )


def follow_up(question: str, tokenizer: Any) -> tuple[Span, ...]:
    """Spans from the end of an answer to the start of the next one, including ``question``."""
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
    """End-of-turn or EOS text that closes an answer, if any. Training data must include it."""
    eos = str(tokenizer.eos_token or "")
    if not has_chat_template(tokenizer):
        return eos
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
    rest = render_chat(tokenizer, messages, add_generation_prompt=False).partition(_SENTINEL)[2]
    return rest.rstrip() or eos


# LlamaIndex joins passages with a blank line, which becomes part of the block before it.
BLANK_LINE = BlockTemplate(after="\n\n")

CHAT = PromptFormat(
    # Text of LlamaIndex's CHAT_TEXT_QA_PROMPT, so that blocks can be shared with LlamaIndex.
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

_PREAMBLE = (
    "You are an intelligent AI assistant. Please answer questions based on the user's "
    "instructions. Below are some reference documents that may help you in answering the "
    "user's question.\n\n"
)
_INSTRUCTION = (
    "Please write a high-quality answer for the given question using only the provided "
    "search documents (some of which might be irrelevant).\nQuestion: {question}"
)

BLOCK_ATTENTION = PromptFormat(
    # RAG prompt from the code of "Block-Attention for Efficient Prefilling" (arXiv 2409.15355).
    name="block-attention",
    system="",
    before=_PREAMBLE,
    titled="Title: {title}\n{text}",
    template=BlockTemplate(before="- ", after="\n"),
    after=f"\n\n{_INSTRUCTION}",
)

TULU3_BLOCK = replace(
    # BLOCK_ATTENTION with the control text of Tulu 3, as in the training data of Tulu3-Block-FT
    # (TemporaryLoRA/Block-Attention, data_process/rag/step2_to_tulu_format.py). The example in the
    # README of that repository has no blank line before the instruction.
    BLOCK_ATTENTION,
    name="tulu3-block",
    frame=Frame(start="<|user|>\n", turn="", answer="\n<|assistant|>\n"),
)

_LLAMA3_SYSTEM = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
_LLAMA3_USER = "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
_LLAMA3_ASSISTANT = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"

LLAMA3_BLOCK = replace(
    # BLOCK_ATTENTION as Llama 3 messages: passages in the system message, instruction in the user
    # message (illinoisdata/lazy-attention, benchmarks/demo_race.py; haochengxia/Block-Attention).
    BLOCK_ATTENTION,
    name="llama3-block",
    after=_INSTRUCTION,
    frame=Frame(start=_LLAMA3_SYSTEM, turn=_LLAMA3_USER, answer=_LLAMA3_ASSISTANT),
)

TURBORAG = PromptFormat(
    # From the code of TurboRAG (arXiv 2410.07590), with its typo "Questuin:" corrected.
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

FORMATS: dict[str, PromptFormat] = {
    known.name: known for known in (CHAT, BLOCK_ATTENTION, TURBORAG, TULU3_BLOCK, LLAMA3_BLOCK)
}


def prompt_format(name: str | PromptFormat) -> PromptFormat:
    """Look up a format by name. A format is returned unchanged.

    Raises:
        ValueError: The name is unknown.
    """
    if isinstance(name, PromptFormat):
        return name
    if name not in FORMATS:
        raise ValueError(f"Unknown prompt format {name!r}: expected one of {', '.join(FORMATS)}.")
    return FORMATS[name]
