"""Markers, which preserve passage boundaries in a string, and their parser.

Frameworks join retrieved passages into one string. Markers show where each passage starts and
ends::

    [[kvblock:H]]text[[/kvblock:H]]

``H`` has 32 hex digits: the first 16 of the text's SHA-256, and the first 16 of the HMAC of those
16 with this installation's key. A marker therefore proves that this installation created its
digits, and shows whether the text has changed since. Any other marker is ordinary text.

A text splitter may cut a passage, which leaves a marker without its partner (an *orphan*), or may
cut within the partner. The orphan determines the partner's text, so a piece of the partner can be
recognized and removed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from blockattn_rag.errors import SegmentationError
from blockattn_rag.files import state_folder, temporary_name
from blockattn_rag.prompts.blocks import (
    NO_TEMPLATE,
    BlockPrompt,
    BlockTemplate,
    Origin,
    Span,
    handle_of,
)

logger = logging.getLogger("blockattn_rag")

KEY_VARIABLE = "BLOCKATTN_RAG_MARKER_KEY"
"""Environment variable with the key. Machines that share marked text need the same key."""

_KEY_BYTES = 32
_SHORTEST_KEY = 16
_key_guard = threading.Lock()

_MARKER = re.compile(r"\[\[(/?)kvblock:([0-9a-f]{32})\]\]")
_HALF = 16
_SHORTEST_PIECE = 6  # Length of "[[/kvb". Shorter pieces may be ordinary text.

MAX_MARKED = 4096
"""Maximum number of marked passages in one text, such as a message."""


class Marker(NamedTuple):
    """A marker of this installation, at ``string[start:end]``. ``seal``: Its 32 hex digits."""

    start: int
    end: int
    closes: bool
    seal: str

    @property
    def partner(self) -> str:
        """Text of the other marker of the passage."""
        return f"[[{'' if self.closes else '/'}kvblock:{self.seal}]]"


class MarkedSpan(NamedTuple):
    """A passage with markers, ``string[start:end]``. ``intact``: Whether its text is unchanged."""

    start: int
    end: int
    text: str
    intact: bool


class Gap(NamedTuple):
    """Text before, between or after marked passages, and the orphans in it."""

    start: int
    end: int
    orphans: Sequence[Marker]


class Parsed(NamedTuple):
    """Marked passages in a string, and the gaps around them: one gap more than passages."""

    passages: list[MarkedSpan]
    gaps: list[Gap]


def wrap(text: str) -> str:
    """Mark a passage: strip its text, and put markers around it. Blank text becomes ``""``."""
    if not (text := text.strip()):
        return ""
    seal = _seal(_digest(text))
    return f"[[kvblock:{seal}]]{text}[[/kvblock:{seal}]]"


def strip_markers(string: str) -> str:
    """Remove all markers from a string for display, including those of other installations."""
    return _MARKER.sub("", string)


def parse(string: str) -> Parsed:
    """Find the marked passages in a string, and the gaps around them, from left to right."""
    markers = own_markers(string)
    partners = _partners(markers)
    passages: list[MarkedSpan] = []
    gaps: list[Gap] = []
    orphans: list[Marker] = []
    # Pairs may be nested, and each pair's text is hashed. This limit keeps the time linear.
    position, to_hash = 0, 4 * len(string)
    for index, marker in enumerate(markers):
        if marker.start < position:
            continue  # This marker is inside a passage.
        if index in partners:
            partner = markers[partners[index]]
            text = string[marker.end : partner.start]
            to_hash -= len(text)
            intact = to_hash >= 0 and _digest(text) == marker.seal[:_HALF]
            # A text that was changed is still a passage if it contains no other marker.
            if intact or partners[index] == index + 1:
                gaps.append(Gap(position, marker.start, orphans))
                passages.append(MarkedSpan(marker.start, partner.end, text, intact))
                position, orphans = partner.end, []
                continue
        orphans.append(marker)
    return Parsed(passages, [*gaps, Gap(position, len(string), orphans)])


def own_markers(string: str) -> list[Marker]:
    markers = [Marker(*m.span(), bool(m[1]), m[2]) for m in _MARKER.finditer(string)]
    own = [m for m in markers if hmac.compare_digest(_seal(m.seal[:_HALF]), m.seal)]
    if len(own) < len(markers):
        _warn_of_foreign_markers()
    return own


def _partners(markers: Sequence[Marker]) -> dict[int, int]:
    """Map each opening marker's index to that of the next marker with its digits, if it closes. A
    text cannot contain its own digest, so no marker inside a passage has the passage's digits."""
    partners: dict[int, int] = {}
    following: dict[str, int] = {}
    for index, marker in reversed([*enumerate(markers)]):
        partner = following.get(marker.seal)
        if not marker.closes and partner is not None and markers[partner].closes:
            partners[index] = partner
        following[marker.seal] = index
    return partners


def _seal(digest: str) -> str:
    code = hmac.new(marker_key(), digest.encode(), hashlib.sha256).hexdigest()
    return digest + code[:_HALF]


def _digest(text: str) -> str:
    return handle_of(text)[:_HALF]


@cache
def _warn_of_foreign_markers() -> None:
    logger.warning(
        "Found block markers that this installation did not create; they are treated as text. If "
        "they come from another of your machines, set the same %s on both (docs/security.md)",
        KEY_VARIABLE,
    )


def marker_key() -> bytes:
    """This installation's key, from the environment or a file. Random if it cannot be saved."""
    with _key_guard:  # Concurrent threads must not create different keys.
        return _found_key()


@cache
def _found_key() -> bytes:
    if key := os.environ.get(KEY_VARIABLE):
        if len(key) < _SHORTEST_KEY:
            raise ValueError(
                f"{KEY_VARIABLE} has {len(key)} characters, expected at least {_SHORTEST_KEY}: "
                "create a key with `python -c 'import secrets; print(secrets.token_hex())'`"
            )
        return key.encode()
    try:
        return _key_in(state_folder() / "marker.key")
    except (OSError, RuntimeError) as error:  # A missing home folder raises RuntimeError.
        logger.info("Markers are only valid in this process: the key cannot be saved (%s)", error)
        return secrets.token_bytes(_KEY_BYTES)


def _key_in(path: Path) -> bytes:
    """Read the key from a file that only the user can read, and create the file if needed."""
    with suppress(FileNotFoundError):
        if len(key := path.read_bytes()) == _KEY_BYTES:
            return key
        path.unlink()  # The file is truncated, for example because the disk was full.
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.touch(0o600, exist_ok=False)
    try:
        temporary.write_bytes(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # Another process created it first.
            os.link(temporary, path)
    finally:
        temporary.unlink()
    return path.read_bytes()


def segment(string: str, template: BlockTemplate = NO_TEMPLATE) -> BlockPrompt:
    """Create a prompt from a string with markers; see ``BlockPrompt.from_spans``.

    Control tokens are not parsed, because the string does not show which text is from a template.
    """
    return BlockPrompt.from_spans(content_spans(string, "conversation"), template)


def content_spans(content: str, origin: Origin) -> list[Span]:
    """Split a message's content into passages and the text around them, without markers."""
    passages, gaps = parse(content)
    if len(passages) > MAX_MARKED:
        raise SegmentationError(
            f"Found {len(passages)} marked passages in one text, expected at most {MAX_MARKED}: "
            "retrieve fewer passages"
        )
    spans = [Span(_without_orphans(content, gaps[0]), origin)]
    for marked, gap in zip(passages, gaps[1:], strict=True):
        spans.append(Span(marked.text, "passage" if marked.intact else "altered"))
        spans.append(Span(_without_orphans(content, gap), origin))
    return spans


def remove_orphans(text: str) -> str:
    """Remove orphans, and pieces of their partners, from text between passages."""
    return _without_orphans(text, Gap(0, len(text), own_markers(text)))


def _without_orphans(string: str, gap: Gap) -> str:
    """Text of a gap, without orphans and pieces of their partners."""
    starts = [gap.start, *(orphan.end for orphan in gap.orphans)]
    ends = [*(orphan.start for orphan in gap.orphans), gap.end]
    kept = [string[start:end] for start, end in zip(starts, ends, strict=True)]
    for index, orphan in enumerate(gap.orphans):
        beside = index if orphan.closes else index + 1
        kept[beside] = _without_piece_of_partner(orphan, kept[beside])
    return "".join(kept)


def holds_orphans(string: str) -> bool:
    return any(gap.orphans for gap in parse(string).gaps)


def close_cut_passages(chunk: str) -> str:
    """Add missing markers to cut passages at the start or end of a text splitter's chunk.

    This turns a cut passage into a passage again, which counts as altered unless it is complete.
    """
    gaps = parse(chunk).gaps
    opens = closes = ""
    if (orphans := gaps[-1].orphans) and not (last := orphans[-1]).closes:
        closes = last.partner
        chunk = chunk[: last.end] + _without_piece_of_partner(last, chunk[last.end :])
    if (orphans := gaps[0].orphans) and (first := orphans[0]).closes:
        opens = first.partner
        chunk = _without_piece_of_partner(first, chunk[: first.start]) + chunk[first.start :]
    return opens + chunk + closes


def _without_piece_of_partner(orphan: Marker, text: str) -> str:
    """Remove the longest piece of an orphan's cut partner, at the edge of a word of ``text``."""
    for size in range(len(orphan.partner) - 1, _SHORTEST_PIECE - 1, -1):
        if orphan.closes:
            piece = r"(?<!\S)" + re.escape(orphan.partner[-size:])
        else:
            piece = re.escape(orphan.partner[:size]) + r"(?!\S)"
        if cut := re.search(piece, text):
            return text[: cut.start()] + text[cut.end() :]
    return text
