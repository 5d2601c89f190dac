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
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from blockattn_rag.files import state_folder, temporary_name
from blockattn_rag.prompts.blocks import handle_of

logger = logging.getLogger("blockattn_rag")

KEY_VARIABLE = "BLOCKATTN_RAG_MARKER_KEY"
"""Environment variable with the key, for machines that exchange marked text."""

_KEY_BYTES = 32
_SHORTEST_KEY = 16
_key_guard = threading.Lock()

_MARKER = re.compile(r"\[\[(/?)kvblock:([0-9a-f]{32})\]\]")
_HALF = 16


class Marker(NamedTuple):
    """A marker of ours: ``string[start:end]``."""

    start: int
    end: int
    closes: bool
    seal: str


class MarkedSpan(NamedTuple):
    """A marked passage: ``string[start:end]`` with its markers, and the text between them.

    ``intact``: the text is the one that the markers were made for.
    """

    start: int
    end: int
    text: str
    intact: bool


class Gap(NamedTuple):
    """Text before, between or after marked passages: ``string[start:end]``.

    ``orphans``: the markers in it, whose partners are missing because a passage was cut.
    """

    start: int
    end: int
    orphans: Sequence[Marker]


class Parsed(NamedTuple):
    """The marked passages of a string, and the gaps around them: one more than passages."""

    passages: list[MarkedSpan]
    gaps: list[Gap]


def wrap(text: str) -> str:
    """The text between markers. Surrounding white space is removed; nothing is left of no text."""
    if not (text := text.strip()):
        return ""
    seal = _seal(_digest(text))
    return opening(seal) + text + closing(seal)


def strip_markers(string: str) -> str:
    """The string without markers, whoever made them: for showing prompts and messages."""
    return _MARKER.sub("", string)


def parse(string: str) -> Parsed:
    """The marked passages of a string and what stands around them, left to right."""
    markers = own_markers(string)
    partners = _partners(markers)
    passages: list[MarkedSpan] = []
    gaps: list[Gap] = []
    orphans: list[Marker] = []
    # Pairs may stand inside pairs, each with a text to hash: a bound keeps the time linear.
    position, to_hash = 0, 4 * len(string)
    for index, marker in enumerate(markers):
        if marker.start < position:
            continue  # it stands inside a passage
        if index in partners:
            partner = markers[partners[index]]
            text = string[marker.end : partner.start]
            to_hash -= len(text)
            intact = to_hash >= 0 and _digest(text) == marker.seal[:_HALF]
            # A changed text is still one passage if no other marker stands in it.
            if intact or partners[index] == index + 1:
                gaps.append(Gap(position, marker.start, orphans))
                passages.append(MarkedSpan(marker.start, partner.end, text, intact))
                position, orphans = partner.end, []
                continue
        orphans.append(marker)
    return Parsed(passages, [*gaps, Gap(position, len(string), orphans)])


def own_markers(string: str) -> list[Marker]:
    """The markers that were made with our key."""
    found = [Marker(*one.span(), bool(one[1]), one[2]) for one in _MARKER.finditer(string)]
    own = [one for one in found if hmac.compare_digest(_seal(one.seal[:_HALF]), one.seal)]
    if len(own) < len(found):
        _tell_of_foreign_markers()
    return own


def opening(seal: str) -> str:
    return f"[[kvblock:{seal}]]"


def closing(seal: str) -> str:
    return f"[[/kvblock:{seal}]]"


def _partners(markers: Sequence[Marker]) -> dict[int, int]:
    """For each opening, the closing marker that may end its text, by index.

    That is the next marker with the same digits: a text cannot hold its own digest, so neither of
    its own markers stands inside it, whatever else does.
    """
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
def _tell_of_foreign_markers() -> None:
    """Once: markers of another installation cannot be told from ones that somebody typed."""
    logger.warning(
        "found block markers that were not made here; they are taken as text. If they come from "
        "another machine of yours, give both the same %s (docs/security.md)",
        KEY_VARIABLE,
    )


def marker_key() -> bytes:
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
    temporary = temporary_name(path)
    temporary.touch(0o600, exist_ok=False)
    try:
        temporary.write_bytes(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # another process was first: its key is the one
            os.link(temporary, path)
    finally:
        temporary.unlink()
    return path.read_bytes()
