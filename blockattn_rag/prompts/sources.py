"""Finds passages that chat front ends mark as sources in their messages.

Importing this module does not load torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from blockattn_rag.prompts.blocks import PASSAGES, Origin, Span, merged
from blockattn_rag.prompts.recognition import MOST_PASSAGES

# Source marks of Open WebUI, AnythingLLM and LibreChat.
_MARKS = re.compile(
    r"""
    (?P<element><source\ id="\d+"[^<>]*>) | (?P<element_end></source>)
    | (?P<context>\[CONTEXT\ \d+\]:\n) | (?P<context_end>\n\[END\ CONTEXT\ \d+\])
    | (?P<item><contextItem>\s{,99}<!\[CDATA\[) | (?P<item_end>\]\]>\s{,99}</contextItem>)
    """,
    re.VERBOSE,
)
_ORIGINS: frozenset[Origin] = frozenset({"conversation", "system"})


def marked_sources(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Split marked sources out of a prompt's text.

    A source is the text between an opening mark and the next closing mark of the same kind, such as
    ``<source id="1" name="notes.txt">`` and ``</source>``. The marks remain as text, because their
    numbers change from question to question. Only user, tool and system messages are split.
    """
    spans = tuple(spans)
    room = MOST_PASSAGES - sum(span.origin in PASSAGES for span in spans)
    pieces: list[Span] = []
    for span in spans:
        at = 0
        if span.origin in _ORIGINS:
            for start, end in _places(span.text):
                if room < 1:
                    break
                room -= 1
                pieces.append(Span(span.text[at:start], span.origin))
                pieces.append(Span(span.text[start:end], "passage"))
                at = end
        pieces.append(Span(span.text[at:], span.origin))
    return merged(pieces)


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each source, in order."""
    # Start of the open source of each kind. A later mark replaces an unclosed mark.
    starts: dict[str, int] = {}
    for mark in _MARKS.finditer(text):
        kind, _, is_end = str(mark.lastgroup).partition("_")
        if not is_end:
            starts[kind] = mark.end()
        elif kind in starts:
            if text[starts[kind] : mark.start()].strip():
                yield starts[kind], mark.start()
            starts.clear()
