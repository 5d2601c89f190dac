"""Parsing of strings with markers into passages and the text around them.

A text splitter may cut a passage, so a marker loses its partner (an *orphan*), or it may cut a
marker in two. A piece of a marker is recognized by the digits of the orphan that it belonged to, so
no other text is changed.
"""

from __future__ import annotations

import re

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import PLAIN, BlockPrompt, BlockTemplate, Origin, Span
from blockattn_rag.prompts.markers import Gap, closing, opening, own_markers, parse

MAX_MARKED = 4096
"""Most marked passages in one message."""

_SHORTEST_PIECE = 6  # "[[/kvb": shorter pieces may be ordinary text


def segment(string: str, template: BlockTemplate = PLAIN) -> BlockPrompt:
    """The prompt of a string with markers; see ``BlockPrompt.from_spans``.

    Control tokens are not parsed in it, because the parts that a template wrote are unknown.
    """
    return BlockPrompt.from_spans(content_spans(string, "conversation"), template)


def content_spans(content: str, origin: Origin) -> list[Span]:
    """The content of a message as passages and the text around them, without our markers.

    Args:
        content: Content, in which markers may be cut.
        origin: Origin of the text around the passages.

    Raises:
        SegmentationError: There are more than ``MAX_MARKED`` passages.
    """
    passages, gaps = parse(content)
    if len(passages) > MAX_MARKED:
        raise SegmentationError(
            f"found {len(passages)} marked passages in one message, expected at most {MAX_MARKED}; "
            "retrieve fewer"
        )
    spans = [Span(without_orphans(content, gaps[0]), origin)]
    for marked, gap in zip(passages, gaps[1:], strict=True):
        spans.append(Span(marked.text, "passage" if marked.intact else "altered"))
        spans.append(Span(without_orphans(content, gap), origin))
    return spans


def remove_orphans(text: str) -> str:
    """Text between passages, without orphans and pieces of their partners."""
    return without_orphans(text, Gap(0, len(text), own_markers(text)))


def without_orphans(string: str, gap: Gap) -> str:
    """The text of a gap without its orphans and without pieces of their partners."""
    starts = [gap.start, *(orphan.end for orphan in gap.orphans)]
    ends = [*(orphan.start for orphan in gap.orphans), gap.end]
    kept = [string[start:end] for start, end in zip(starts, ends, strict=True)]
    for index, orphan in enumerate(gap.orphans):
        if orphan.closes:
            kept[index] = _without_tail_of(opening(orphan.seal), kept[index])
        else:
            kept[index + 1] = _without_head_of(closing(orphan.seal), kept[index + 1])
    return "".join(kept)


def holds_orphans(string: str) -> bool:
    """Whether a string contains an orphan, because a passage was cut."""
    return any(gap.orphans for gap in parse(string).gaps)


def close_cut_passages(chunk: str) -> str:
    """A chunk of a text splitter with the missing markers added at its ends.

    A cut passage is a passage again, altered unless all of its text is there.

    Args:
        chunk: Output of the splitter. A passage that it cut starts or ends where the chunk does.
    """
    gaps = parse(chunk).gaps
    opens = closes = ""
    if (orphans := gaps[-1].orphans) and not (last := orphans[-1]).closes:
        closes = closing(last.seal)
        chunk = chunk[: last.end] + _without_head_of(closes, chunk[last.end :])
    if (orphans := gaps[0].orphans) and (first := orphans[0]).closes:
        opens = opening(first.seal)
        chunk = _without_tail_of(opens, chunk[: first.start]) + chunk[first.start :]
    return opens + chunk + closes


def _without_head_of(marker: str, text: str) -> str:
    """``text`` without the start of a cut marker that ends one of its words."""
    for size in range(len(marker) - 1, _SHORTEST_PIECE - 1, -1):
        if found := re.search(re.escape(marker[:size]) + r"(?=\s|\Z)", text):
            return text[: found.start()] + text[found.end() :]
    return text


def _without_tail_of(marker: str, text: str) -> str:
    """``text`` without the end of a cut marker that starts one of its words."""
    for start in range(1, len(marker) - _SHORTEST_PIECE + 1):
        if found := re.search(r"(?:(?<=\s)|\A)" + re.escape(marker[start:]), text):
            return text[: found.start()] + text[found.end() :]
    return text
