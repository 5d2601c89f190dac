"""Parses strings with markers into passages and the text around them.

A text splitter may cut a passage, which leaves a marker without its partner (an *orphan*), or cut
the partner itself. Pieces of a cut marker have the same digits as the orphan, so they can be
removed without changing other text.
"""

from __future__ import annotations

import re

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import PLAIN, BlockPrompt, BlockTemplate, Origin, Span
from blockattn_rag.prompts.markers import Gap, closing, opening, own_markers, parse

MAX_MARKED = 4096
"""Maximum number of marked passages in one message."""

_SHORTEST_PIECE = 6  # "[[/kvb": shorter pieces may be ordinary text


def segment(string: str, template: BlockTemplate = PLAIN) -> BlockPrompt:
    """Create a prompt from a string with markers; see ``BlockPrompt.from_spans``.

    Control tokens are not parsed, because it is unknown which text a template wrote.
    """
    return BlockPrompt.from_spans(content_spans(string, "conversation"), template)


def content_spans(content: str, origin: Origin) -> list[Span]:
    """Split the content of a message into passages and the text around them, without markers.

    Args:
        content: Content of the message. Markers in it may be cut.
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
    """Remove orphans and pieces of their partners from text between passages."""
    return without_orphans(text, Gap(0, len(text), own_markers(text)))


def without_orphans(string: str, gap: Gap) -> str:
    """The text of a gap, without orphans and pieces of their partners."""
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
    """Add missing markers at the ends of a text splitter's chunk.

    This makes a cut passage a passage again. It counts as altered unless its text is complete.

    Args:
        chunk: Output of the splitter. Cut passages must be at its start or end.
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
    """Remove the start of a cut marker, at the end of a word, from ``text``."""
    for size in range(len(marker) - 1, _SHORTEST_PIECE - 1, -1):
        if found := re.search(re.escape(marker[:size]) + r"(?=\s|\Z)", text):
            return text[: found.start()] + text[found.end() :]
    return text


def _without_tail_of(marker: str, text: str) -> str:
    """Remove the end of a cut marker, at the start of a word, from ``text``."""
    for start in range(1, len(marker) - _SHORTEST_PIECE + 1):
        if found := re.search(r"(?:(?<=\s)|\A)" + re.escape(marker[start:]), text):
            return text[: found.start()] + text[found.end() :]
    return text
