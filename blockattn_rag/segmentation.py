"""Cutting what is not a list of passages into blocks: conversations, texts, examples, JSON state.

Sources: "Efficient Prefilling" (Block-Attention, arXiv 2409.15355), section 3.1 for texts and
few-shot examples, appendix A for the state of a game. Text alone: no tensors here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from blockattn_rag.blocks import Block, BlockPrompt, BlockTemplate
from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts import has_chat_template, render_chat

# ---------------------------------------------------------------------------------------------
# Conversations


class Turn(NamedTuple):
    """A message as the chat template writes it: ``before + content + after``."""

    before: str
    content: str
    after: str

    @property
    def text(self) -> str:
        return self.before + self.content + self.after


def conversation_turns(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> list[Turn]:
    """Cut a conversation into its turns, in the chat template of ``tokenizer``.

    The texts of the turns, in order, are the whole conversation up to where the next answer
    starts (or to the end, when the last message is the assistant's). White space around contents
    is removed.

    Raises:
        SegmentationError: no chat template, no message, or a template that drops or reorders
            contents.
    """
    if not messages:
        raise SegmentationError("found no message; a conversation needs at least one")
    if not has_chat_template(tokenizer):
        raise SegmentationError(
            "the tokenizer has no chat template, which tells how messages become text; "
            "set tokenizer.chat_template, or give texts instead of messages"
        )
    # Contents are put in after rendering: where each one stands is then known beyond doubt, and
    # nothing a user wrote is taken for a part of the template.
    marks = [f"\u241e{i}\u241e" for i in range(len(messages))]
    marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    open_end = messages[-1]["role"] != "assistant"
    gaps = _split_at(render_chat(tokenizer, marked, add_generation_prompt=open_end), marks)
    before, turns = gaps[0], []
    for i, message in enumerate(messages):
        gap = gaps[i + 1]
        last = i == len(messages) - 1
        after = gap if last else _common(gap, _closing(tokenizer, marked[: i + 1]))
        turns.append(Turn(before, message["content"].strip(), after))
        before = gap[len(after) :]
    return turns


def conversation(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> BlockPrompt:
    """A prompt in which every turn but the last is a block of its own; the last is the final block.

    Control tokens are recognised in what the template writes, never in what an earlier turn says.
    """
    *context, final = conversation_turns(messages, tokenizer)
    blocks = (Block(t.content, BlockTemplate(t.before, t.after)) for t in context if t.text)
    return BlockPrompt(tuple(blocks), final.text)


def _split_at(text: str, marks: Sequence[str]) -> list[str]:
    """The pieces of text before, between and after the marks, which must come once, in order."""
    pieces = []
    for mark in marks:
        piece, found, text = text.partition(mark)
        if not found or mark in text:
            raise SegmentationError(
                "the chat template drops, repeats or reorders messages, so that turns cannot be "
                "told apart in its output; give texts instead of messages"
            )
        pieces.append(piece)
    return [*pieces, text]


def _closing(tokenizer: Any, marked: list[dict[str, str]]) -> str:
    """What the template writes after the last of these messages; empty where it refuses them."""
    from jinja2 import TemplateError

    try:
        text = render_chat(tokenizer, marked, add_generation_prompt=False)
    except TemplateError:  # many refuse a lone system message; the next turn then opens earlier
        return ""
    return text.partition(marked[-1]["content"])[2]


def _common(one: str, other: str) -> str:
    """The longest string that both begin with."""
    pairs = zip(one, other, strict=False)
    return one[: next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]
