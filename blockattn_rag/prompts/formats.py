"""Prompt formats as data: how a question and its passages become a prompt.

A prompt format says what stands before the passages, around each of them, and after them. The text
before the first passage is block 0, each passage is a block, and the rest is the final block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
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
class Frame:
    """Control text of a format that does not stand in the tokenizer's own chat template.

    Args:
        start: opens the prompt.
        passages: between the text before the passages and the first of them.
        turn: opens the final block.
        answer: after the question; the answer starts behind it.
    """

    start: str
    passages: str
    turn: str
    answer: str


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
        frame: control text that takes the place of the tokenizer's chat template.
        numbered: template of the n-th passage, from 1 on, where it depends on n; it takes the place
            of ``template``, and a passage at another place is another block.
    """

    name: str
    system: str
    before: str
    titled: str
    template: BlockTemplate
    after: str
    frame: Frame | None = None
    numbered: Callable[[int], BlockTemplate] | None = None

    def canonical_text(self, passage: Passage) -> str:
        """The text that a passage's handle names."""
        if not passage.title:
            return passage.text.strip()
        return self.titled.format(title=passage.title, text=passage.text).strip()

    def prompt(self, question: str, passages: Sequence[Passage], tokenizer: Any) -> BlockPrompt:
        """The prompt up to where the answer starts, in ``tokenizer``'s chat template if any, or in
        the format's own frame.

        Raises:
            ValueError: more passages than the format has numbers for.
        """
        user = (
            Span(self.before, "system"),  # the same for every question
            *(Span(self.canonical_text(passage), "passage") for passage in passages),
            Span(self.after.format(question=question), "conversation"),
        )
        prompt = BlockPrompt.from_spans(self._with_control(user, tokenizer), self.template)
        return prompt if self.numbered is None else _renumbered(prompt, self.numbered)

    def _with_control(self, user: tuple[Span, ...], tokenizer: Any) -> tuple[Span, ...]:
        """The text of a prompt with the control text around it."""
        if frame := self.frame:
            before, *passages, after = user
            opening = (Span(frame.start, "template"), before, Span(frame.passages, "template"))
            turn, answer = Span(frame.turn, "template"), Span(frame.answer, "template")
            return (*opening, *passages, turn, after, answer)
        if not has_chat_template(tokenizer):
            head = f"{self.system}\n\n" if self.system else ""
            return (Span(head, "system"), *user)
        messages: list[Message] = [{"role": "user", "content": user}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return chat_spans(tokenizer, messages)


def _renumbered(prompt: BlockPrompt, template_of: Callable[[int], BlockTemplate]) -> BlockPrompt:
    """The prompt with each passage in the template of its number."""
    numbers = count(1)
    context = (
        replace(block, template=template_of(next(numbers))) if block.is_passage else block
        for block in prompt.context
    )
    return replace(prompt, context=tuple(context))


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
    # Block-Attention for Efficient Prefilling (2409.15355), RAG prompt of the released code.
    name="block-attention",
    system="",
    before=_PREAMBLE,
    titled="Title: {title}\n{text}",
    template=BlockTemplate(before="- ", after="\n"),
    after=f"\n\n{_INSTRUCTION}",
)

TULU3_BLOCK = replace(
    # The same in the frame of Tulu 3, as the training data of Tulu3-Block-FT were made
    # (TemporaryLoRA/Block-Attention, data_process/rag/step2_to_tulu_format.py). The example in that
    # repository's readme has no blank line before the instruction.
    BLOCK_ATTENTION,
    name="tulu3-block",
    frame=Frame(start="<|user|>\n", passages="", turn="", answer="\n<|assistant|>\n"),
)

_LLAMA3_SYSTEM = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
_LLAMA3_USER = "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
_LLAMA3_ASSISTANT = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"

LLAMA3_BLOCK = replace(
    # The same as Llama 3 messages: passages in the system message, the instruction in the user's
    # (illinoisdata/lazy-attention, benchmarks/demo_race.py; haochengxia/Block-Attention).
    BLOCK_ATTENTION,
    name="llama3-block",
    after=_INSTRUCTION,
    frame=Frame(start=_LLAMA3_SYSTEM, passages="", turn=_LLAMA3_USER, answer=_LLAMA3_ASSISTANT),
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

KVLINK_LINKS = 5
"""Link tokens after each passage of KVLink5."""

_MOST_LINKED = 48  # passages that Llama 3.2 has spare tokens for


def _linked(number: int) -> BlockTemplate:
    if number > _MOST_LINKED:
        raise ValueError(
            f"the format kvlink has link tokens for {_MOST_LINKED} passages, found more; show fewer"
        )
    first = 3 + KVLINK_LINKS * (number - 1)  # token 3 of the spare ones is id 128011
    links = (f"<|reserved_special_token_{n}|>" for n in range(first, first + KVLINK_LINKS))
    return BlockTemplate(before=f"Document [{number}]", after="\n" + "".join(links))


KVLINK = PromptFormat(
    # KVLink (2502.16002) as its evaluation scripts write it, "a intelligent" included. Its link
    # tokens attend to all before them, so this text is exact in full mode alone. Spare tokens 246
    # and 247 open and close the passages.
    name="kvlink",
    system="",
    before=(
        "You are a intelligent AI assistant. Please answer questions based on the user's "
        "instruction. Below are some reference documents that may help you in answering the "
        "user's question."
    ),
    titled="(Title: {title}) {text}",
    template=BlockTemplate(after="\n"),
    after="{question}",
    frame=Frame(
        start=_LLAMA3_SYSTEM,
        passages=f"{_LLAMA3_USER}<|reserved_special_token_246|>",
        turn="<|reserved_special_token_247|>",
        answer=_LLAMA3_ASSISTANT,
    ),
    numbered=_linked,
)

FORMATS: dict[str, PromptFormat] = {
    one.name: one for one in (CHAT, BLOCK_ATTENTION, TURBORAG, TULU3_BLOCK, LLAMA3_BLOCK, KVLINK)
}


def prompt_format(name: str | PromptFormat) -> PromptFormat:
    """The format of that name."""
    if isinstance(name, PromptFormat):
        return name
    if name not in FORMATS:
        raise ValueError(f"unknown prompt format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]
