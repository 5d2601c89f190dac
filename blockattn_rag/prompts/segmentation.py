"""Splits conversations into blocks (Block-Attention, arXiv 2409.15355, section 3.1)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jinja2 import TemplateError

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Origin, Span
from blockattn_rag.prompts.chat_template import has_chat_template, origin_of, render_chat


def conversation(
    messages: Sequence[Mapping[str, str]], tokenizer: Any, *, blocks_per_turn: int = 1
) -> BlockPrompt:
    """Create a prompt with one block per conversation turn. The last turn is the final block.

    The text is the chat template's output up to the start of the next answer, or complete if the
    last message is the assistant's. White space around contents is removed. Control tokens are only
    parsed in the template's own text, never in contents.

    Args:
        messages: Messages with the fields ``role`` and ``content`` only.
        tokenizer: Transformers tokenizer with a chat template.
        blocks_per_turn: Maximum number of blocks per turn. Turns are split at paragraphs,
            horizontal rules or lines. The last turn is only split if no other turn has text, as in
            single-turn training data.

    Raises:
        SegmentationError: There is no chat template or no message, a message has other fields, or
            the template drops, repeats or reorders contents.
        ValueError: ``blocks_per_turn`` is less than 1.
    """
    if blocks_per_turn < 1:
        raise ValueError(f"Invalid blocks_per_turn {blocks_per_turn}: expected 1 or more.")
    *context, last = _turns(messages, tokenizer)
    blocks = [
        block for turn in context if any(turn[:3]) for block in _blocks(turn, blocks_per_turn)
    ]
    *opening, final = _blocks(last, 1 if blocks else blocks_per_turn)
    return BlockPrompt((*blocks, *opening), final.rendered, final.rendered_spans)


class _Turn(NamedTuple):
    """A message as rendered by the chat template: ``before + content + after``."""

    before: str
    content: str
    after: str
    origin: Origin


def _turns(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> list[_Turn]:
    if not messages:
        raise SegmentationError("Found no messages: a conversation needs at least one.")
    if not has_chat_template(tokenizer):
        raise SegmentationError(
            "The tokenizer has no chat template to render messages with: set "
            "tokenizer.chat_template, or pass texts instead of messages."
        )
    for message in messages:
        if more := message.keys() - {"role", "content"}:
            raise SegmentationError(
                f"Found a message with {', '.join(map(repr, sorted(more)))}, expected 'role' and "
                "'content' only: the origin of text from other fields cannot be determined."
            )
    # Render the template with a placeholder for each message's content. Otherwise, content that
    # resembles the template could be mistaken for it.
    marks = [f"\u241e{i}\u241e" for i in range(len(messages))]
    marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    open_end = messages[-1]["role"] != "assistant"
    text = render_chat(tokenizer, marked, add_generation_prompt=open_end)
    # The pieces are gap, mark, gap, mark, ..., gap.
    pieces = re.split(f"({'|'.join(marks)})", text)
    if pieces[1::2] != marks:
        raise SegmentationError(
            "The chat template drops, repeats or reorders messages, so its output cannot be split "
            "into turns: pass texts instead of messages."
        )
    before, turns = pieces[0], []
    for i, (message, gap) in enumerate(zip(messages, pieces[2::2], strict=True), 1):
        both = [gap, _closing(tokenizer, marked[:i])] if i < len(messages) else [gap]
        after = os.path.commonprefix(both)  # noqa: RUF071 (compares characters)
        turns.append(_Turn(before, message["content"].strip(), after, origin_of(message["role"])))
        before = gap[len(after) :]
    return turns


def _closing(tokenizer: Any, marked: list[dict[str, str]]) -> str:
    """Template text after the last message. Empty if the template rejects the messages."""
    try:
        text = render_chat(tokenizer, marked, add_generation_prompt=False)
    except TemplateError:  # Many templates reject a lone system message.
        return ""
    return text.partition(marked[-1]["content"])[2]


def _blocks(turn: _Turn, limit: int) -> list[Block]:
    pieces, blocks = _split(turn.content, limit), []
    for i, piece in enumerate(pieces, 1):
        before, after = turn.before if i == 1 else "", turn.after if i == len(pieces) else ""
        blocks.append(Block.of([Span(piece, turn.origin)], BlockTemplate(before, after)))
    return blocks


# Separators, coarsest first: paragraphs, horizontal rules, indented lines, lines. A text is split
# at the first kind that it contains. Lines may end with \r\n, and empty lines may contain spaces.
_SEPARATORS = (r"\n[ \t]*\r?\n\s*", r"-{3,}\s*", r"={3,}\s*", r"\n\t\s*", r"\n\s*")


def _split(text: str, limit: int) -> list[str]:
    """Split a stripped text at its coarsest separator into at most ``limit`` pieces. No characters
    are lost. If there are too many cuts, the cuts that split most evenly are kept."""
    ends = ([cut.end() for cut in re.finditer(separator, text)] for separator in _SEPARATORS)
    cuts = [end for end in next(filter(None, ends), []) if end < len(text)]
    if len(cuts) >= limit:
        shares = (len(text) * part / limit for part in range(1, limit))
        cuts = sorted({min(cuts, key=lambda end: abs(end - share)) for share in shares})
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
