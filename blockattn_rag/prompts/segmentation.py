"""Splits other text than passages into blocks: conversations, few-shot examples, JSON state.

There is one function per use case in "Block-Attention for Efficient Prefilling" (arXiv 2409.15355):
``conversation`` and ``few_shot`` (section 3.1), ``split_json`` (appendix A, the state of a game).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jinja2 import TemplateError

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Origin, Span
from blockattn_rag.prompts.chat_template import has_chat_template, origin_of, render_chat


def conversation(
    messages: Sequence[Mapping[str, str]], tokenizer: Any, *, blocks_per_turn: int = 1
) -> BlockPrompt:
    """Create a prompt with one block per turn of a conversation. The last turn is the final block.

    The text is the output of the chat template, up to the start of the next answer, or to the end
    if the last message is the assistant's. White space around contents is removed. Control tokens
    are parsed only in the template's own text, never in contents.

    Args:
        messages: Messages with the fields ``role`` and ``content`` only.
        tokenizer: Transformers tokenizer with a chat template.
        blocks_per_turn: Maximum number of blocks per turn. Turns are split at paragraphs, rules or
            lines. The last turn is split only if it is the only one, as in single-turn training
            data.

    Raises:
        SegmentationError: There is no chat template or message, a message has other fields, or the
            template drops, repeats or reorders contents.
        ValueError: ``blocks_per_turn`` is less than 1.
    """
    if blocks_per_turn < 1:
        raise ValueError(f"Expected blocks_per_turn of at least 1, found {blocks_per_turn}.")
    *context, last = _turns(messages, tokenizer)
    blocks = [
        block for turn in context if any(turn[:3]) for block in _blocks(turn, blocks_per_turn)
    ]
    *opening, final = _blocks(last, 1 if blocks else blocks_per_turn)
    return BlockPrompt((*blocks, *opening), final.rendered, final.rendered_spans)


class _Turn(NamedTuple):
    """A message as the chat template renders it: ``before + content + after``."""

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
    # The template is rendered with marks in place of contents, so that a content that looks like
    # part of the template is never mistaken for it.
    marks = [f"\u241e{i}\u241e" for i in range(len(messages))]
    marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    open_end = messages[-1]["role"] != "assistant"
    text = render_chat(tokenizer, marked, add_generation_prompt=open_end)
    pieces = re.split(f"({'|'.join(marks)})", text)  # gap, mark, gap, mark, ..., gap
    if pieces[1::2] != marks:
        raise SegmentationError(
            "The chat template drops, repeats or reorders messages, so its output cannot be split "
            "into turns: pass texts instead of messages."
        )
    before, turns = pieces[0], []
    for i, (message, gap) in enumerate(zip(messages, pieces[2::2], strict=True), 1):
        both = [gap, _closing(tokenizer, marked[:i])] if i < len(messages) else [gap]
        after = os.path.commonprefix(both)  # noqa: RUF071 (characters are meant)
        turns.append(_Turn(before, message["content"].strip(), after, origin_of(message["role"])))
        before = gap[len(after) :]
    return turns


def _closing(tokenizer: Any, marked: list[dict[str, str]]) -> str:
    """The template's text after the last message. Empty if the template refuses the messages."""
    try:
        text = render_chat(tokenizer, marked, add_generation_prompt=False)
    except TemplateError:  # many templates refuse a lone system message
        return ""
    return text.partition(marked[-1]["content"])[2]


def _blocks(turn: _Turn, limit: int) -> list[Block]:
    """Split a turn into blocks. The template's text becomes part of the first and last block."""
    pieces = _split(turn.content, limit)
    return [
        Block.of(
            [Span(piece, turn.origin)],
            BlockTemplate(
                turn.before if i == 0 else "", turn.after if i == len(pieces) - 1 else ""
            ),
        )
        for i, piece in enumerate(pieces)
    ]


# Separators, coarsest first: paragraphs, rules, indented lines, lines. A text is split at the first
# one that it contains. Lines may end with \r\n, and empty lines may contain spaces.
_SEPARATORS = (r"\n[ \t]*\r?\n\s*", r"-{3,}\s*", r"={3,}\s*", r"\n\t\s*", r"\n\s*")


def _split(text: str, limit: int) -> list[str]:
    """Split a stripped text after its coarsest separator into at most ``limit`` pieces.

    No character is lost. If there are too many cuts, the cuts that give the most equal pieces are
    kept.
    """
    found = ([cut.end() for cut in re.finditer(one, text)] for one in _SEPARATORS)
    cuts = [end for end in next(filter(None, found), []) if end < len(text)]
    if len(cuts) >= limit:
        shares = (len(text) * part / limit for part in range(1, limit))
        cuts = sorted({min(cuts, key=lambda end: abs(end - share)) for share in shares})
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def few_shot(examples: Sequence[str], query: str, *, separator: str = "\n\n") -> BlockPrompt:
    """Create a prompt with one block per non-empty example. The query is the final block."""
    template = BlockTemplate(after=separator)
    return BlockPrompt(tuple(Block(e, template) for e in examples if e.strip()), query)


_JSON_DEPTH = 2


def split_json(state: Any) -> list[str]:
    """Split a JSON value into lines, one per block, so that a changed field changes only one line.

    Plain fields of an object share a line. Nested objects and lists get their own lines, up to two
    levels deep. A line starts with its path, so it does not depend on its place::

        state: {"tick": 7, "map": "desert"}
        state.units[id=3]: {"id": 3, "hp": 20, "at": [4, 9]}
        state.units[id=8]: {"id": 8, "hp": 35, "at": [1, 2]}

    The path of an object in a list uses its ``id``, so items can be added, removed or moved without
    changing other lines. Items without an id, or with a duplicate id, use their index.

    Args:
        state: A value as returned by ``json.loads``.

    Raises:
        SegmentationError: The value is not JSON. NaN, infinities, tuples and keys that are not
            strings are not JSON.
    """
    try:
        is_json = json.loads(json.dumps(state, allow_nan=False)) == state
    except (TypeError, ValueError, RecursionError) as error:
        raise SegmentationError(f"Expected a state that is JSON: {error}.") from error
    if not is_json:
        raise SegmentationError(
            "Expected a state that is JSON: keys must be strings, and sequences lists."
        )
    return list(_lines(state, "state", _JSON_DEPTH))


def _lines(value: Any, path: str, depth: int) -> Iterator[str]:
    """Split a value into lines, up to ``depth`` levels deep."""
    if depth == 0 or _is_plain(value):
        yield _line(path, value)
    elif isinstance(value, dict):
        if plain := {key: child for key, child in value.items() if _is_plain(child)}:
            yield _line(path, plain)
        for key, child in value.items():
            if key not in plain:
                name = f".{key}" if key.isidentifier() else f"[{json.dumps(key)}]"
                yield from _lines(child, path + name, depth - 1)
    else:
        for name, child in zip(_item_names(value), value, strict=True):
            yield from _lines(child, path + name, depth - 1)


def _is_plain(value: Any) -> bool:
    """Whether a value is a scalar, a list of scalars, or an empty object."""
    if isinstance(value, dict):
        return not value
    return not (isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value))


def _item_names(items: Sequence[Any]) -> Iterator[str]:
    """``[id=7]`` for objects with an id that no earlier item has, else the index: ``[0]``."""
    seen: set[Any] = set()
    for index, item in enumerate(items):
        identity = item.get("id") if isinstance(item, dict) else None
        if type(identity) in (str, int) and identity not in seen:  # excludes bool
            seen.add(identity)
            yield f"[id={json.dumps(identity)}]"
        else:
            yield f"[{index}]"


def _line(path: str, value: Any) -> str:
    return f"{path}: {json.dumps(value, ensure_ascii=False)}\n"
