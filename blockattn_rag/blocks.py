"""Blocks, prompts made of blocks, and the markers that carry block boundaries through a string.

A prompt is ``context blocks + final block``. Each context block attends to itself only; the
final block attends to everything (Block-Attention, section 2.1). This module knows text alone:
no tokenizer, no tensors.

Marker grammar::

    [[kvblock:H]]text[[/kvblock:H]]        H = first 32 hex digits of sha256(text)

Frameworks flatten retrieved passages into one string; markers let the boundaries survive that.
A marker is a promise that is checked: only where ``H`` is the digest of the text between the two
markers is the text taken as a *verified* block. Everything else is ordinary text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HANDLE_LENGTH = 32
"""Hex digits of a handle: 128 bits of the sha256 of the block's text."""

_MARKER = re.compile(r"\[\[(/?)kvblock:([0-9a-f]{32})\]\]")
_OPEN_LENGTH = len("[[kvblock:]]") + HANDLE_LENGTH
_CLOSE_LENGTH = _OPEN_LENGTH + 1


def handle_of(text: str) -> str:
    """Content address of a block's canonical text: 32 hex digits."""
    return _sha256(text)[:HANDLE_LENGTH]


@dataclass(frozen=True, slots=True)
class BlockTemplate:
    """What a prompt format puts before and after a passage's text, its separator included.

    It is tokenised together with the passage and so belongs to the block. Control tokens of the
    model (``<|doc_start|>``) are recognised in the template, never in the passage's own text.
    """

    before: str = ""
    after: str = ""


PLAIN = BlockTemplate()


@dataclass(frozen=True, slots=True)
class Block:
    """A span of text whose tokens attend only to one another.

    Args:
        text: the canonical text; what the handle names.
        template: what stands before and after the text when the block is encoded.
        control: whether control tokens (``<|im_start|>``) inside ``text`` are parsed. True only for
            text that comes from a prompt template, never for passages.
    """

    text: str
    template: BlockTemplate = PLAIN
    control: bool = False
    handle: str = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"a block's text must be a str, found {type(self.text).__name__}")
        if not self.rendered:
            raise ValueError("a block's text is empty; leave empty passages out of the prompt")
        object.__setattr__(self, "handle", handle_of(self.text))

    @property
    def rendered(self) -> str:
        """The text as the model sees it: template and text."""
        return self.template.before + self.text + self.template.after

    def digest(self, *, first: bool) -> str:
        """sha256 of all that decides the block's token ids under a given tokenizer.

        ``first``: the block opens the prompt, and so carries the BOS token if the model uses one.
        """
        parts = (self.template.before, self.text, self.template.after)
        head = f"{'control' if self.control else 'text'}:{'first' if first else 'later'}"
        return _sha256("\0".join([head, *(f"{len(part)}:{part}" for part in parts)]))


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A prompt as the engine takes it: context blocks, then the final block.

    ``final`` holds all that comes after the last block: instructions, history, the question, and
    the start of the answer. Control tokens in it are parsed.
    """

    context: tuple[Block, ...]
    final: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", tuple(self.context))
        for block in self.context:
            if not isinstance(block, Block):
                raise TypeError(f"context must hold Block objects, found {type(block).__name__}")
        if not isinstance(self.final, str):
            raise TypeError(f"final must be a str, found {type(self.final).__name__}")
        if not self.context and not self.final:
            raise ValueError("the prompt is empty: it has no context block and no final text")

    @classmethod
    def from_texts(cls, texts: Sequence[str | Block]) -> BlockPrompt:
        """A prompt from a list whose last item is the final block.

        Strings before the last are taken as passages: control tokens in them stay text. Empty
        strings before the last are left out.
        """
        if isinstance(texts, str) or not texts:
            raise ValueError(
                "expected a non-empty list of texts whose last item is the final block, "
                f"found {texts!r:.60}"
            )
        *context, final = texts
        if isinstance(final, Block):
            raise TypeError("the last item of a prompt is its final block and must be a str")
        blocks = (
            text if isinstance(text, Block) else Block(text) for text in context if text != ""
        )
        return cls(tuple(blocks), final)

    @property
    def text(self) -> str:
        """The prompt as one string, without markers."""
        return "".join(block.rendered for block in self.context) + self.final


class MarkedSpan(NamedTuple):
    """A marked span: ``string[start:end]`` with its markers, and the text between them."""

    start: int
    end: int
    text: str


def wrap(text: str) -> str:
    """The text between the markers of its own digest. Surrounding white space is removed."""
    text = text.strip()
    if not text:
        return ""
    handle = handle_of(text)
    return f"[[kvblock:{handle}]]{text}[[/kvblock:{handle}]]"


def segment(string: str, template: BlockTemplate = PLAIN) -> BlockPrompt:
    """Parse a string with markers into blocks.

    Marked spans become blocks with ``template``. Text before the first block becomes the first
    block; text between two blocks becomes a block of its own unless it is white space, which the
    template's own separator replaces; text after the last block is the final block. Marker
    fragments that pair with nothing are removed.
    """
    context: list[Block] = []
    position = 0
    for span in marked_spans(string):
        gap = strip_markers(string[position : span.start])
        if gap.strip() or (gap and position == 0):
            context.append(Block(gap, control=True))
        text = span.text.strip()
        if text:
            context.append(Block(text, template))
        position = span.end
    return BlockPrompt(tuple(context), strip_markers(string[position:]))


def marked_spans(string: str) -> Iterator[MarkedSpan]:
    """Spans to take as blocks, left to right: verified ones, and pairs whose text was changed."""
    markers = list(_MARKER.finditer(string))
    partners = _partners(markers)
    position = 0
    for index, marker in enumerate(markers):
        closing = markers[partners[index]] if index in partners else None
        if closing is None or marker.start() < position:
            continue
        text = string[marker.end() : closing.start()]
        # A changed text (escaped, edited) is still one passage if no other marker stands in it: it
        # is computed as a block of its own instead of being looked up.
        if partners[index] == index + 1 or handle_of(text) == marker.group(2):
            yield MarkedSpan(marker.start(), closing.end(), text)
            position = closing.end()


def _partners(markers: Sequence[re.Match[str]]) -> dict[int, int]:
    """For each opening, the closing marker that may end its text, by index.

    That is the next marker of the same handle: a text cannot hold its own digest, so neither of its
    own markers stands inside it, whatever else does.
    """
    partners: dict[int, int] = {}
    following: dict[str, int] = {}
    for index in range(len(markers) - 1, -1, -1):
        slash, handle = markers[index].groups()
        if not slash and handle in following and markers[following[handle]].group(1):
            partners[index] = following[handle]
        following[handle] = index
    return partners


# What a splitter leaves of a marker that it cut. The head ends, and the tail begins, where it cut:
# at white space or at an end of the string. Heads of at least four characters and tails of at least
# eight digits are recognised; shorter ones cannot be told from text such as "[[1 2] [3 4]]".
_HEAD = re.compile(
    r"\[\[(?:/k|kv|/?kvb|/?kvbl|/?kvblo|/?kvbloc|/?kvblock|/kv|/?kvblock:[0-9a-f]{0,32}\]?)\Z"
)
_TAIL = re.compile(r"(?:\[?/?(?:(?:(?:(?:(?:k?v)?b)?l)?o)?c)?k:[0-9a-f]{32}|:?[0-9a-f]{8,32})\]\]")
_WORD = re.compile(r"\S+")


def strip_markers(string: str) -> str:
    """The string without markers and marker fragments, for showing and logging prompts."""
    if "]]" not in string and "[[" not in string:
        return string
    stripped = _MARKER.sub("", string)
    if _MARKER.search(stripped):
        stripped = _strip_nested(stripped)
    return _WORD.sub(_strip_fragments, stripped)


def _strip_nested(string: str) -> str:
    """Remove markers that come to be when others are removed from inside them, in one pass."""
    kept: list[str] = []
    for character in string:
        kept.append(character)
        if character == "]" and _MARKER.fullmatch("".join(kept[-_CLOSE_LENGTH:])):
            del kept[-_CLOSE_LENGTH:]
        elif character == "]" and _MARKER.fullmatch("".join(kept[-_OPEN_LENGTH:])):
            del kept[-_OPEN_LENGTH:]
    return "".join(kept)


def _strip_fragments(match: re.Match[str]) -> str:
    """A word less the marker heads at its end and the marker tails at its start."""
    word = match.group()
    if "[[" not in word and "]]" not in word:
        return word
    start, end = 0, len(word)
    while head := _HEAD.search(word, max(0, end - _CLOSE_LENGTH), end):
        end = head.start()
    while tail := _TAIL.match(word, start, end):
        start = tail.end()
    return word[start:end]


def _sha256(text: str) -> str:
    # surrogatepass: a str from outside may hold lone surrogates; the digest must still exist.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
