"""Cutting what is not a list of passages into blocks: conversations, texts, examples, JSON state.

Sources: "Efficient Prefilling" (Block-Attention, arXiv 2409.15355), section 3.1 for texts and
few-shot examples, appendix A for the state of a game. Text alone: no tensors here.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jinja2 import TemplateError

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Origin, Span
from blockattn_rag.prompts.chat_template import has_chat_template, origin_of, render_chat


class Turn(NamedTuple):
    """A message as the chat template writes it: ``before + content + after``."""

    before: str
    content: str
    after: str
    origin: Origin = "conversation"

    @property
    def text(self) -> str:
        return self.before + self.content + self.after

    @property
    def spans(self) -> tuple[Span, ...]:
        """The text by who wrote it."""
        before, after = (Span(text, "template") for text in (self.before, self.after))
        return (before, Span(self.content, self.origin), after)


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
    for message in messages:
        if more := message.keys() - {"role", "content"}:
            raise SegmentationError(
                f"found a message with {', '.join(map(repr, sorted(more)))}; a turn is its 'role' "
                "and 'content': what a template makes of other fields could not be told from it"
            )
    # Contents are put in after rendering: where each one stands is then known beyond doubt, and
    # nothing a user wrote is taken for a part of the template.
    marks = [f"\u241e{i}\u241e" for i in range(len(messages))]
    marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    open_end = messages[-1]["role"] != "assistant"
    text = render_chat(tokenizer, marked, add_generation_prompt=open_end)
    pieces = re.split(f"({'|'.join(marks)})", text)  # gap, mark, gap, mark, ..., gap
    if pieces[1::2] != marks:
        raise SegmentationError(
            "the chat template drops, repeats or reorders messages, so that turns cannot be told "
            "apart in its output; give texts instead of messages"
        )
    before, turns = pieces[0], []
    for i, (message, gap) in enumerate(zip(messages, pieces[2::2], strict=True), 1):
        both = [gap, _closing(tokenizer, marked[:i])] if i < len(messages) else [gap]
        after = os.path.commonprefix(both)  # noqa: RUF071 (characters are meant)
        turns.append(Turn(before, message["content"].strip(), after, origin_of(message["role"])))
        before = gap[len(after) :]
    return turns


def conversation(
    messages: Sequence[Mapping[str, str]], tokenizer: Any, *, blocks_per_turn: int = 1
) -> BlockPrompt:
    """A prompt in which every turn but the last is a block of its own; the last is the final block.

    Control tokens are recognised in what the template writes, never in what an earlier turn says.

    Args:
        blocks_per_turn: cut long turns further, by :func:`split_text`, into at most that many
            blocks. A last turn that has none before it is cut too, its last piece being final (as
            the paper trains on single-turn data).
    """
    *context, final = conversation_turns(messages, tokenizer)
    blocks = [block for turn in context for block in _turn_blocks(turn, blocks_per_turn)]
    if blocks or blocks_per_turn == 1:
        return BlockPrompt(tuple(blocks), final.text, final.spans)
    *head, tail = _turn_blocks(final, blocks_per_turn)
    return BlockPrompt(tuple(head), tail.rendered, tail.rendered_spans)


def _turn_blocks(turn: Turn, limit: int) -> list[Block]:
    """The blocks of one turn; what the template wrote goes to the first and the last piece."""
    if not turn.text:
        return []
    pieces = split_text(turn.content, max_blocks=limit) or [""]
    last = len(pieces) - 1
    return [
        Block.of(
            [Span(piece, turn.origin)],
            BlockTemplate(turn.before if i == 0 else "", turn.after if i == last else ""),
        )
        for i, piece in enumerate(pieces)
    ]


def _closing(tokenizer: Any, marked: list[dict[str, str]]) -> str:
    """What the template writes after the last of these messages; empty where it refuses them."""
    try:
        text = render_chat(tokenizer, marked, add_generation_prompt=False)
    except TemplateError:  # many refuse a lone system message; the next turn then opens earlier
        return ""
    return text.partition(marked[-1]["content"])[2]


# Where texts are cut; the first of these that a text holds is used, and no other. A line may end
# with \r\n, and an empty one may hold spaces.
_SEPARATORS = (r"\n[ \t]*\r?\n\s*", r"-{3,}\s*", r"={3,}\s*", r"\n\t\s*", r"\n\s*")


def split_text(text: str, *, max_blocks: int | None = 15) -> list[str]:
    """Cut a text at its coarsest separator (section 3.1); the pieces joined are the text.

    A piece ends with its separator and the white space around it, and none is white space alone
    (but for a text that is nothing else). An empty text has no piece.

    Args:
        max_blocks: merge neighbours, the smallest pair first, until so few are left.
    """
    if max_blocks is not None and max_blocks < 1:
        raise ValueError(f"max_blocks must be at least 1, found {max_blocks}")
    cuts = ([cut.end() for cut in re.finditer(one, text)] for one in _SEPARATORS)
    lead = len(text) - len(text.lstrip())
    starts = [0, *(end for end in next(filter(None, cuts), []) if end > lead), len(text)]
    pieces = [text[a:b] for a, b in pairwise(starts) if a < b]
    return pieces if max_blocks is None else merge_smallest(pieces, max_blocks)


def merge_smallest(pieces: Sequence[str], max_blocks: int) -> list[str]:
    """Join neighbours until at most ``max_blocks`` are left, always the pair that is shortest.

    Of equally short pairs the leftmost is joined. Time O(n log n) in the number of pieces.
    """
    sizes = [*map(len, pieces), math.inf]  # the last stands for the end, which no pair takes
    before, after = list(range(-1, len(pieces))), list(range(1, len(pieces) + 1))
    heap = [(a + b, i) for i, (a, b) in enumerate(pairwise(sizes))]
    heapq.heapify(heap)
    for _ in range(len(pieces) - max_blocks):
        size, left = heapq.heappop(heap)
        while not sizes[left] or sizes[left] + sizes[after[left]] != size:
            size, left = heapq.heappop(heap)  # that was stale: one of the pair was joined since
        right = after[left]
        sizes[left], sizes[right] = size, 0
        after[left] = after[right]
        before[after[left]] = left
        heapq.heappush(heap, (size + sizes[after[left]], left))
        if left:
            heapq.heappush(heap, (sizes[before[left]] + size, before[left]))
    return ["".join(pieces[i : after[i]]) for i, size in enumerate(sizes[:-1]) if size]


def few_shot(examples: Sequence[str], query: str, *, separator: str = "\n\n") -> BlockPrompt:
    """k examples and a query: k + 1 blocks, the query final. Empty examples are left out."""
    template = BlockTemplate(after=separator)
    return BlockPrompt(tuple(Block(e, template) for e in examples if e.strip()), query)


_WORD = re.compile(r"[^\W\d][\w-]*")
"""A key or id that is written as it stands. Numbers are not: ``"3"`` is another id than ``3``."""


def split_json(state: Any, *, depth: int | None = 2, name: str = "state") -> list[str]:
    """Cut a JSON value into lines, each a block, so that a changed field changes one line only.

    The cut depends on structure alone, never on lengths or values: down to ``depth``, the plain
    fields of an object are one line, and every object or list inside it has its own lines; at
    ``depth``, a value is one line. A line names its path, so it reads the same wherever it stands::

        state: {"tick": 7, "map": "desert"}
        state.units[id=3]: {"id": 3, "hp": 20, "at": [4, 9]}
        state.units[id=8]: {"id": 8, "hp": 35, "at": [1, 2]}

    List items that are objects with an ``id`` are named by it, so that items may come, go and move
    without changing the lines of others; other items, and those whose id came before in the list,
    are named by index. Keys and ids that are no plain words are quoted, so that different states
    never give the same lines.

    Args:
        state: what ``json.loads`` returns.
        depth: levels to descend; None for all.
        name: what the lines call the whole.

    Raises:
        SegmentationError: the value is not JSON (NaN, infinities and keys other than strings are
            not), or nested too deep.
    """
    try:
        _check_keys(state)
        return list(_lines(state, name, -1 if depth is None else depth))
    except (TypeError, ValueError) as error:
        raise SegmentationError(f"found a state that is not JSON: {error}") from error
    except RecursionError as error:
        raise SegmentationError("found a state that is nested too deep, or holds itself") from error


def _check_keys(value: Any) -> None:
    """Other keys than strings would be written as strings, and may then be lost to equal ones."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no string")
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            _check_keys(child)


def _lines(value: Any, path: str, depth: int) -> Iterator[str]:
    """Lines of a value; ``depth`` counts down to 0, and from -1 never gets there."""
    if depth == 0 or _is_plain(value):
        yield _line(path, value)
        return
    if isinstance(value, dict):
        if plain := {key: child for key, child in value.items() if _is_plain(child)}:
            yield _line(path, plain)
        inner = [(_field(key), child) for key, child in value.items() if key not in plain]
    else:
        inner = list(zip(_item_names(value), value, strict=True))
    for name, child in inner:
        yield from _lines(child, path + name, depth - 1)


def _is_plain(value: Any) -> bool:
    """Whether a value has no inner structure: a scalar, or a list of scalars."""
    if isinstance(value, dict):
        return not value
    return not (isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value))


def _field(key: str) -> str:
    return f".{key}" if _WORD.fullmatch(key) else f"[{json.dumps(key)}]"


def _item_names(items: Sequence[Any]) -> Iterator[str]:
    """``[id=7]`` of objects with an id that no item before has, else ``[0]``, the index."""
    seen: set[str] = set()
    for index, item in enumerate(items):
        identity = item.get("id") if isinstance(item, dict) else None
        plain = isinstance(identity, str) and _WORD.fullmatch(identity)
        name = f"[id={identity if plain else json.dumps(identity)}]"
        if not isinstance(identity, (str, int)) or isinstance(identity, bool) or name in seen:
            name = f"[{index}]"
        seen.add(name)
        yield name


def _line(path: str, value: Any) -> str:
    return f"{path}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n"
