"""Finds passages in text without markers: indexed passages, and sources marked by chat front ends.

A passage's index entry consists of a polynomial hash of the ``WINDOW`` characters in its middle, a
hash of all characters, its length, and its handle. The middle is used because many passages start
or end alike, with a header or a footer. A scan hashes every window of a text in one pass. Each
window that is in the index yields candidate passages, whose texts are verified by both hashes and
the handle, so a wrong entry never yields a wrong passage.

Importing this module does not load torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import regex
from numpy.typing import NDArray

from blockattn_rag.prompts.blocks import PASSAGES, Origin, Span, handle_of, merged, text_of

Recognize: TypeAlias = bool | Literal["system"]
"""Option of chat models: whether to find passages in text without markers. ``"system"``: also in
system messages."""

WINDOW = 32
"""Number of characters in the middle of a passage that are hashed for lookups. Shorter passages are
not indexed."""

MOST_PASSAGES = 127
"""Number of passages in a prompt, marked ones included, at which recognition stops. With text
around each of them, the prompt has 255 blocks, within the limit of servers (256)."""

ENTRY = np.dtype([("window", "<u8"), ("whole", "<u8"), ("chars", "<u4"), ("handle", "u1", (16,))])
"""A passage's index entry: hash of its window, hash of all characters, number of characters, and
handle."""

MOST_CHARACTERS = 1 << 20
"""Maximum number of characters in an indexed passage, and in a scanned prompt."""

_BASE, _SCALE = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
# Maximum number of candidates per index in a scan, because many passages may share a window.
_MOST_PAIRS = 1 << 17
_WASTED = 8  # A scan stops after failed handle checks of this many times the text's length.

# A run without letters and digits that is at least as long as the shortest indexed passage.
_WORDLESS = re.compile(rf"[\W_]{{{WINDOW},}}")
# Source marks of Open WebUI, AnythingLLM and LibreChat.
_SOURCE_MARKS = re.compile(
    r"""
    (?P<element><source\ id="\d+"[^<>]*>) | (?P<element_end></source>)
    | (?P<context>\[CONTEXT\ \d+\]:\n) | (?P<context_end>\n\[END\ CONTEXT\ \d+\])
    | (?P<item><contextItem>\s{,99}<!\[CDATA\[) | (?P<item_end>\]\]>\s{,99}</contextItem>)
    """,
    re.VERBOSE,
)
_SOURCE_ORIGINS: frozenset[Origin] = frozenset({"conversation", "system"})

# Two characters that may belong to one grapheme. Flags and joined emoji or letters depend on
# earlier characters, so any two flag letters match, as does a letter or emoji after a joiner.
_GRAPHEME = regex.compile(
    r"\X|.\p{M}|[\p{M}\p{GCB=Extend}\p{GCB=ZWJ}][\w\p{Extended_Pictographic}]", regex.DOTALL
)

Entries = NDArray[np.void]
"""Index entries, ``ENTRY [passages]``."""

Integers = NDArray[Any]


@cache
def _power_table(bits: int) -> tuple[Integers, Integers]:
    tables = []
    for base, first in ((_BASE, 1), (pow(_BASE, -1, 1 << 64), _SCALE)):
        powers = np.full(1 << bits, base, np.uint64)
        powers[0] = first
        tables.append(np.multiply.accumulate(powers))
    return tables[0], tables[1]


def _powers(count: int) -> tuple[Integers, Integers]:
    """At least ``count`` powers of the hash base, and scaled powers of its inverse."""
    return _power_table(max(16, count.bit_length()))


def _characters(text: str) -> Integers:
    encoded = text.encode("utf-32-le", "surrogatepass")
    return np.frombuffer(encoded, "<u4").astype(np.uint64)


def entries_of(texts: Iterable[str]) -> Entries:
    """Create index entries for passages, ignoring surrounding white space.

    Skips passages without letters or digits, and those that are too short or too long to index.
    """
    rows = []
    for text in (text.strip() for text in texts):
        if WINDOW <= len(text) <= MOST_CHARACTERS and not _WORDLESS.fullmatch(text):
            powers, inverses = _powers(len(text))
            terms = _characters(text) * powers[: len(text)]
            at, whole = _middle(len(text)), int(terms.sum()) * _SCALE & _MASK
            window = int(terms[at : at + WINDOW].sum()) * int(inverses[at]) & _MASK
            rows.append((window, whole, len(text), [*bytes.fromhex(handle_of(text))]))
    return np.array(rows, ENTRY)


class PassageMatcher:
    """Index that finds its passages in texts. Thread-safe. ``entries``: ``ENTRY [passages]``."""

    def __init__(self, entries: Entries) -> None:
        order = np.argsort(np.ascontiguousarray(entries["window"]), kind="stable")
        self.entries = entries[order]
        self._windows = np.ascontiguousarray(self.entries["window"])
        self._chars = self.entries["chars"].astype(np.int64)
        # A bit table, indexed by the first bits of a hash, rejects most windows without a search.
        # It takes 8 to 16 bytes per passage, but at least 512 bytes and at most 128 MiB.
        bits = min(30, max(12, (64 * len(entries)).bit_length()))
        self._shift = np.uint64(64 - bits)
        seen = np.zeros(1 << bits, np.bool_)
        seen[(self._windows >> self._shift).view(np.int64)] = True
        self._seen = np.packbits(seen, bitorder="little")

    def __len__(self) -> int:
        return len(self.entries)

    def has(self, entries: Entries) -> NDArray[np.bool_]:
        """Whether each entry is indexed, ``bool [passages]``."""
        left, right = (
            self._windows.searchsorted(entries["window"], to) for to in ("left", "right")
        )
        pairs = zip(entries, left, right, strict=True)
        return np.array([entry in self.entries[start:end] for entry, start, end in pairs], np.bool_)

    def split(
        self, spans: Iterable[Span], *others: PassageMatcher, in_system: bool = False
    ) -> tuple[Span, ...]:
        """Turn the parts of a prompt's spans that are indexed passages into spans of their own.

        Longer passages take precedence, and passages never overlap. Chat template text, earlier
        answers and existing passages stay unchanged, as do prompts with more than
        ``MOST_CHARACTERS``. A passage must lie within one span, and so within one message
        (``chat_spans``). It must not start or end within a word, because its tokens would differ.

        Args:
            others: Additional indexes to search.
            in_system: Whether to search system messages. This separates a passage from the rules
                around it, so documents must be as trusted as the rules.
        """
        spans = tuple(span for span in spans if span.text)
        room = _room(spans)
        ends = np.cumsum([len(span.text) for span in spans], dtype=np.int64)
        text = text_of(spans)
        matchers = [matcher for matcher in (self, *others) if len(matcher)]
        if not matchers or not room or not WINDOW <= len(text) <= MOST_CHARACTERS:
            return merged(spans)
        kept = {*PASSAGES, "template", "answer", *(() if in_system else ("system",))}
        is_plain = np.array([span.origin not in kept for span in spans])
        return _split_out(spans, _passages(matchers, text, ends, is_plain, room))

    def candidates(
        self, sums: Integers, inverses: Integers, windows: Integers
    ) -> tuple[Integers, Entries]:
        """Starts of candidate passages, and their entries. Takes the ``_hashes`` of a text."""
        prefixes = windows >> self._shift
        seen = self._seen.take((prefixes >> np.uint64(3)).view(np.int64))
        at = np.flatnonzero((seen >> (prefixes.astype(np.uint8) & 7)) & 1)
        left = np.searchsorted(self._windows, windows[at], "left")
        counts = np.searchsorted(self._windows, windows[at], "right") - left
        kept = np.flatnonzero((counts > 0) & (np.cumsum(counts) <= _MOST_PAIRS))
        at, left, counts = at[kept], left[kept], counts[kept]
        rows = np.arange(counts.sum()) + np.repeat(left - np.cumsum(counts) + counts, counts)
        starts = np.repeat(at, counts) - _middle(self._chars[rows])
        stops = starts + self._chars[rows]
        fits = np.flatnonzero((starts >= 0) & (stops < len(sums)))
        starts, stops, rows = starts[fits], stops[fits], rows[fits]
        hashes = (sums[stops] - sums[starts]) * inverses[starts]
        same = np.flatnonzero(hashes == self.entries["whole"][rows])
        return starts[same], self.entries[rows[same]]


def marked_sources(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Turn sources that chat front ends mark in a prompt into passages, up to ``MOST_PASSAGES``.

    A source is the text between an opening mark and the next closing mark of the same kind, such as
    ``<source id="1" name="notes.txt">`` and ``</source>``. The marks remain as text, because their
    numbers change from question to question. Only user, tool and system messages are split.
    """
    spans = tuple(spans)
    places, at = list[tuple[int, int]](), 0
    for span in spans:
        if span.origin in _SOURCE_ORIGINS:
            places += [(at + start, at + end) for start, end in _sources(span.text)]
        at += len(span.text)
    return _split_out(spans, places[: _room(spans)])


def _sources(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each source that is not blank, in order."""
    # Start of the unclosed source of each kind. A later opening mark of the kind replaces it.
    starts: dict[str, int] = {}
    for mark in _SOURCE_MARKS.finditer(text):
        kind, _, is_end = str(mark.lastgroup).partition("_")
        if not is_end:
            starts[kind] = mark.end()
        elif kind in starts:
            if text[starts[kind] : mark.start()].strip():
                yield starts[kind], mark.start()
            starts.clear()


def _room(spans: Iterable[Span]) -> int:
    """Number of passages that may still be found in a prompt."""
    return max(0, MOST_PASSAGES - sum(span.origin in PASSAGES for span in spans))


def _split_out(spans: Sequence[Span], places: list[tuple[int, int]]) -> tuple[Span, ...]:
    """Turn ``text_of(spans)[start:end]`` into a passage for each of the sorted ``places``."""
    text, at = text_of(spans), 0
    pieces: list[Span] = []
    for span, end in zip(spans, accumulate(len(span.text) for span in spans), strict=True):
        while places and places[0][0] < end:
            start, stop = places.pop(0)
            pieces += Span(text[at:start], span.origin), Span(text[start:stop], "passage")
            at = stop
        pieces.append(Span(text[at:end], span.origin))
        at = end
    return merged(pieces)


def _hashes(text: str) -> tuple[Integers, Integers, Integers]:
    """Prefix sums of a text's hash, their scales, and the hash of each window."""
    size = len(text)
    powers, inverses = _powers(size + 1)
    sums = np.zeros(size + 1, np.uint64)
    np.cumsum(_characters(text) * powers[:size], out=sums[1:])
    return sums, inverses, (sums[WINDOW:] - sums[:-WINDOW]) * inverses[: size - WINDOW + 1]


def _passages(
    matchers: Sequence[PassageMatcher], text: str, ends: Integers, is_plain: Integers, most: int
) -> list[tuple[int, int]]:
    """Start and end of up to ``most`` passages, in order."""
    hashes = _hashes(text)
    parts = [matcher.candidates(*hashes) for matcher in matchers]
    starts, entries = (np.concatenate(part) for part in zip(*parts, strict=True))
    stops = starts + entries["chars"]
    place = np.searchsorted(ends, starts, "right")
    inside = is_plain[place] & (stops <= ends[place]) & _has_words(text, starts, stops)
    starts, stops, place = starts[inside], stops[inside], place[inside]
    handles = entries["handle"][inside]
    first, last = np.concatenate([[0], ends])[place], ends[place]
    taken, passages, wasted = bytearray(len(text)), list[tuple[int, int]](), 0
    for row in np.lexsort((starts, starts - stops)).tolist():
        start, stop = int(starts[row]), int(stops[row])
        if taken[start] or taken[stop - 1]:
            # It overlaps a passage that is at least as long.
            continue
        if any(_is_within(text, cut, first[row], last[row]) for cut in (start, stop)):
            continue
        if handle_of(text[start:stop]) != handles[row].tobytes().hex():
            wasted += stop - start
            if wasted > _WASTED * len(text):
                break
            continue
        taken[start:stop] = bytes([1]) * (stop - start)
        passages.append((start, stop))
        if len(passages) == most:
            break
    return sorted(passages)


def _middle(chars: Any) -> Any:
    """Start of the window in passages with this many characters."""
    return (chars - WINDOW) // 2


def _has_words(text: str, starts: Integers, stops: Integers) -> NDArray[np.bool_]:
    """Whether each passage ``text[start:stop]`` contains a letter or digit."""
    runs = np.array([run.span() for run in _WORDLESS.finditer(text)]).reshape(-1, 2)
    if not len(runs):
        return np.ones(len(starts), np.bool_)
    # Index -1, if no run starts before the passage, selects the last run, which starts after it.
    run = runs[runs[:, 0].searchsorted(starts, "right") - 1]
    return (starts < run[:, 0]) | (stops > run[:, 1])


def _is_within(text: str, at: int, first: int, last: int) -> bool:
    """Whether a cut at ``at`` is within a grapheme, word or number of ``text[first:last]``."""
    if not first < at < last:
        return False
    around = text[max(first, at - 2) : at].rjust(2) + text[at : min(last, at + 2)].ljust(2)
    return _GRAPHEME.fullmatch(around[1:3]) is not None or _in_word(around)


def _in_word(around: str) -> bool:
    """Whether a cut in the middle of these four characters is within a word or a number."""
    if around[1] in "+-\N{MINUS SIGN}" and around[2].isdigit() and not around[0].isalnum():
        return True
    within = around[1:3] if around[1].isalnum() else around[:3]
    within = within if around[2].isalnum() else around[1:]
    if within[1] in ".,":
        return within[0].isdigit() and within[-1].isdigit()
    joins = len(within) == 2 or within[1] in "'\N{RIGHT SINGLE QUOTATION MARK}_-"
    return joins and within[0].isalnum() and within[-1].isalnum()


def joined(parts: Sequence[Entries]) -> Entries:
    entries = np.concatenate([np.empty(0, ENTRY), *parts])
    rows = np.unique(entries.view(np.dtype((np.void, ENTRY.itemsize))))
    return rows.view(ENTRY)


def checked(entries: Entries) -> Entries:
    """Validate index entries, and return them. Raises ``ValueError`` if a length is invalid."""
    chars = entries["chars"]
    if len(wrong := chars[(chars < WINDOW) | (chars > MOST_CHARACTERS)]):
        raise ValueError(
            f"Invalid index entry of {wrong[0]} characters: expected {WINDOW} to {MOST_CHARACTERS}"
        )
    return entries
