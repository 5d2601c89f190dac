"""Markers: how the boundaries of passages travel through a string.

Frameworks flatten retrieved passages into one string. Markers let the boundaries survive that::

    [[kvblock:H]]text[[/kvblock:H]]

``H`` has 32 hex digits: the first 16 of the text's sha256, and the first 16 of their HMAC under a
key that only this installation has. So a marker tells two things by itself: that a part of this
package made it, wherever it is found, and whether the text is still the one that it was made for.
What looks like a marker and is not ours, such as one that somebody typed into a question, is text.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from blockattn_rag.errors import SegmentationError
from blockattn_rag.files.folders import state_folder
from blockattn_rag.prompts.blocks import PLAIN, BlockPrompt, BlockTemplate, Origin, Span, handle_of

logger = logging.getLogger("blockattn_rag")

KEY_VARIABLE = "BLOCKATTN_RAG_MARKER_KEY"
"""Environment variable with the key, for programs on several machines that pass marked text on."""

MAX_MARKED = 4096
"""Marked passages in one message at most."""

_MARKER = re.compile(r"\[\[(/?)kvblock:([0-9a-f]{32})\]\]")
_HALF = 16
_KEY_BYTES = 32
_SHORTEST_KEY = 16
_key_guard = threading.Lock()


class MarkedSpan(NamedTuple):
    """A marked passage: ``string[start:end]`` with its markers, and the text between them.

    ``intact``: the text is the one that the markers were made for.
    """

    start: int
    end: int
    text: str
    intact: bool


def wrap(text: str) -> str:
    """The text between markers. Surrounding white space is removed; nothing is left of no text."""
    text = text.strip()
    if not text:
        return ""
    seal = _seal(_digest(text))
    return f"[[kvblock:{seal}]]{text}[[/kvblock:{seal}]]"


def segment(string: str, template: BlockTemplate = PLAIN) -> BlockPrompt:
    """The prompt that a string with markers stands for; see ``BlockPrompt.from_spans``.

    Control tokens are not parsed anywhere in it: nobody can tell what of it came from a template.
    """
    return BlockPrompt.from_spans(content_spans(string, "conversation"), template)


def content_spans(content: str, origin: Origin) -> list[Span]:
    """A message's content as passages and, of the given origin, the text around them.

    Our markers are gone from it, whole and cut ones; all else is as it was.

    Raises:
        SegmentationError: more than ``MAX_MARKED`` passages.
    """
    spans: list[Span] = []
    position = 0
    for count, marked in enumerate(marked_spans(content), start=1):
        if count > MAX_MARKED:
            raise SegmentationError(
                f"found more than {MAX_MARKED} marked passages in one message; retrieve fewer"
            )
        spans.append(Span(remove_orphans(content[position : marked.start]), origin))
        spans.append(Span(marked.text, "passage" if marked.intact else "altered"))
        position = marked.end
    return [*spans, Span(remove_orphans(content[position:]), origin)]


def marked_spans(string: str) -> Iterator[MarkedSpan]:
    """The marked passages of a string, left to right."""
    markers = _own_markers(string)
    partners = _partners(markers)
    # Of pairs inside pairs each would have to be hashed; a bound keeps the time linear.
    position, to_hash = 0, 4 * len(string)
    for index, marker in enumerate(markers):
        if index not in partners or marker.start() < position:
            continue
        closing = markers[partners[index]]
        text = string[marker.end() : closing.start()]
        to_hash -= len(text)
        intact = to_hash >= 0 and _digest(text) == marker.group(2)[:_HALF]
        # A changed text is still one passage if no other marker stands in it.
        if intact or partners[index] == index + 1:
            yield MarkedSpan(marker.start(), closing.end(), text, intact)
            position = closing.end()


def remove_orphans(text: str) -> str:
    """Text between passages, without markers whose partner is missing.

    A text splitter may have cut the partner in two, and left a piece of it at the splitter's own
    cut. A piece is known by the orphan: by its very digits, so that no other text is touched.
    """
    if not (orphans := _own_markers(text)):
        return text
    kept, position = [], 0
    for orphan in orphans:
        kept.append(text[position : orphan.start()])
        position = orphan.end()
    kept.append(text[position:])
    for index, orphan in enumerate(orphans):
        slash, seal = orphan.groups()
        if slash:
            kept[index] = _without_tail_of(f"[[kvblock:{seal}]]", kept[index])
        else:
            kept[index + 1] = _without_head_of(f"[[/kvblock:{seal}]]", kept[index + 1])
    return "".join(kept)


def holds_orphans(string: str) -> bool:
    """Whether a string holds a marker of ours whose partner is missing: a passage was cut."""
    return bool(_orphans(string, list(marked_spans(string))))


def close_cut_passages(chunk: str) -> str:
    """A chunk that a text splitter made, with the markers that it cut off put at its ends.

    What was cut is one passage again, known as altered unless all of its text is there.

    Args:
        chunk: the splitter's own output: passages that it cut begin, or end, where it does.
    """
    spans = list(marked_spans(chunk))
    orphans = _orphans(chunk, spans)
    if not orphans:
        return chunk
    first, last = orphans[0], orphans[-1]
    opens = closes = ""
    if not last.group(1) and not any(span.start > last.start() for span in spans):
        closes = f"[[/kvblock:{last.group(2)}]]"
        chunk = chunk[: last.end()] + _without_head_of(closes, chunk[last.end() :])
    if first.group(1) and not any(span.start < first.start() for span in spans):
        opens = f"[[kvblock:{first.group(2)}]]"
        chunk = _without_tail_of(opens, chunk[: first.start()]) + chunk[first.start() :]
    return opens + chunk + closes


def _orphans(string: str, spans: Sequence[MarkedSpan]) -> list[re.Match[str]]:
    """Our markers that stand neither around nor inside a marked passage."""
    return [
        marker
        for marker in _own_markers(string)
        if not any(span.start <= marker.start() < span.end for span in spans)
    ]


def strip_markers(string: str) -> str:
    """The string without markers, whoever made them: for showing prompts and messages."""
    return _MARKER.sub("", string)


def _own_markers(string: str) -> list[re.Match[str]]:
    """The markers that were made with our key."""
    found = list(_MARKER.finditer(string))
    own = [marker for marker in found if _is_own(marker.group(2))]
    if len(own) < len(found):
        _tell_of_foreign_markers()
    return own


def _partners(markers: Sequence[re.Match[str]]) -> dict[int, int]:
    """For each opening, the closing marker that may end its text, by index.

    That is the next marker with the same digits: a text cannot hold its own digest, so neither of
    its own markers stands inside it, whatever else does.
    """
    partners: dict[int, int] = {}
    following: dict[str, int] = {}
    for index in range(len(markers) - 1, -1, -1):
        slash, seal = markers[index].groups()
        if not slash and seal in following and markers[following[seal]].group(1):
            partners[index] = following[seal]
        following[seal] = index
    return partners


_SHORTEST_PIECE = 6  # "[[/kvb": shorter ones may be words of the text


def _without_head_of(marker: str, text: str) -> str:
    """Without the start of a cut marker, where a word of ``text`` ends with it."""
    for size in range(len(marker) - 1, _SHORTEST_PIECE - 1, -1):
        found = re.search(re.escape(marker[:size]) + r"(?=\s|\Z)", text)
        if found:
            return text[: found.start()] + text[found.end() :]
    return text


def _without_tail_of(marker: str, text: str) -> str:
    """Without the end of a cut marker, where a word of ``text`` begins with it."""
    for start in range(1, len(marker) - _SHORTEST_PIECE + 1):
        found = re.search(r"(?:(?<=\s)|\A)" + re.escape(marker[start:]), text)
        if found:
            return text[: found.start()] + text[found.end() :]
    return text


# -- the key --------------------------------------------------------------------------------------


def _seal(digest: str) -> str:
    code = hmac.new(_key(), digest.encode(), hashlib.sha256).hexdigest()
    return digest + code[:_HALF]


def _is_own(seal: str) -> bool:
    return hmac.compare_digest(_seal(seal[:_HALF]), seal)


def _digest(text: str) -> str:
    return handle_of(text)[:_HALF]


def _key() -> bytes:
    """The key of this installation: from the environment, else from a file of the user's.

    Where no file can be kept, the key lives as long as the process.

    Raises:
        ValueError: the key in the environment is so short that it could be guessed.
    """
    with _key_guard:  # threads that come at once must not make one key each
        return _found_key()


@cache
def _found_key() -> bytes:
    if given := os.environ.get(KEY_VARIABLE):
        if len(given) < _SHORTEST_KEY:
            raise ValueError(
                f"{KEY_VARIABLE} has {len(given)} characters, expected at least {_SHORTEST_KEY}, "
                "drawn at random: python -c 'import secrets; print(secrets.token_hex())'"
            )
        return given.encode()
    try:
        return _key_in(state_folder() / "marker.key")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        logger.info("markers are valid in this process only: no key can be kept (%s)", error)
        return secrets.token_bytes(_KEY_BYTES)


def _key_in(path: Path) -> bytes:
    """The key in a file that only the user can read; made by whoever comes first."""
    with suppress(FileNotFoundError):
        if len(key := path.read_bytes()) == _KEY_BYTES:
            return key
        path.unlink()  # cut short by a full disk: no key at all
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # another process was first: its key is the one
            os.link(temporary, path)
    finally:
        temporary.unlink()
    return path.read_bytes()


@cache
def _tell_of_foreign_markers() -> None:
    """Once: markers of another installation cannot be told from ones that somebody typed."""
    logger.warning(
        "found block markers that were not made here; they are taken as text. If they come from "
        "another machine of yours, give both the same %s (docs/security.md)",
        KEY_VARIABLE,
    )
