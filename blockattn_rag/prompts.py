"""Prompt formats as data, and the step from chat messages to the one string a model is given.

A prompt format says what stands before the passages, around each of them, and after them. The text
before the first passage is block 0, each passage is a block, and the rest is the final block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockattn_rag.blocks import BlockPrompt, BlockTemplate, segment, wrap

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
        marked = "".join(wrap(self.canonical_text(passage)) for passage in passages)
        user = self.before + marked + self.after.format(question=question)
        if not has_chat_template(tokenizer):
            head = f"{self.system}\n\n" if self.system else ""
            return segment(head + user, self.template)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": user})
        return segment(render_chat(tokenizer, messages), self.template)


def follow_up(question: str, tokenizer: Any) -> str:
    """Text between the end of one answer and the start of the next one, asking ``question``."""
    if not has_chat_template(tokenizer):
        return f"\n\nQuestion: {question}\nAnswer: "
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _SENTINEL},
        {"role": "user", "content": question},
    ]
    return render_chat(tokenizer, messages).partition(_SENTINEL)[2]


def answer_end(tokenizer: Any) -> str:
    """What closes an answer and so must be learned after it: the end-of-turn or EOS token."""
    eos = str(tokenizer.eos_token or "")
    if not has_chat_template(tokenizer):
        return eos
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
    rest = render_chat(tokenizer, messages, add_generation_prompt=False).partition(_SENTINEL)[2]
    return rest.rstrip() or eos


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> str:
    """Messages as one string, by the model's own chat template, control tokens included.

    Neighbouring messages of one role are merged, since many templates insist on alternation, and
    a system message goes into the first user message where the template knows no system role.
    """
    merged = _merge_same_role(messages)
    has_system = merged[0]["role"] == "system" and len(merged) > 1
    try:
        text = _apply_template(tokenizer, merged, add_generation_prompt)
    except Exception:
        # Templates refuse by raising whatever their author chose; only a system role is mended.
        if not has_system:
            raise
    else:
        if not has_system or merged[0]["content"].strip() in text:
            return text  # some templates drop a system message without a word
    system, first, *rest = merged
    joined = {**first, "content": f"{system['content']}\n\n{first['content']}"}
    return _apply_template(tokenizer, [joined, *rest], add_generation_prompt)


def _apply_template(
    tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )


def _merge_same_role(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise ValueError("expected at least one chat message, found none")
    merged: list[dict[str, Any]] = []
    for message in messages:
        same_role = bool(merged) and merged[-1]["role"] == message["role"]
        if same_role and _only_words(merged[-1]) and _only_words(message):
            merged[-1]["content"] = f"{merged[-1]['content']}\n\n{message['content']}"
        else:
            merged.append(dict(message))
    return merged


def _only_words(message: Mapping[str, Any]) -> bool:
    """Whether a message carries no more than its text: tool calls must not be lost in a merge."""
    return set(message) <= {"role", "content"}


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
