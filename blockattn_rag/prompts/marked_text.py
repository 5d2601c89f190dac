"""Strings with markers as passages, and the text around them by who wrote it.

A text splitter may have cut a passage, so that a marker's partner is missing, or a marker in two,
and left a piece of it at the splitter's own cut. A piece is known by the orphan, the marker whose
partner it was: by its very digits, so that no other text is touched.
"""

from __future__ import annotations

import re

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import PLAIN, BlockPrompt, BlockTemplate, Origin, Span
from blockattn_rag.prompts.markers import Gap, closing, opening, own_markers, parse

MAX_MARKED = 4096
"""Marked passages in one message at most."""

_SHORTEST_PIECE = 6  # "[[/kvb": shorter ones may be words of the text


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
    passages, gaps = parse(content)
    if len(passages) > MAX_MARKED:
        raise SegmentationError(
            f"found more than {MAX_MARKED} marked passages in one message; retrieve fewer"
        )
    spans = [Span(without_orphans(content, gaps[0]), origin)]
    for marked, gap in zip(passages, gaps[1:], strict=True):
        spans.append(Span(marked.text, "passage" if marked.intact else "altered"))
        spans.append(Span(without_orphans(content, gap), origin))
    return spans


def remove_orphans(text: str) -> str:
    """Text between passages, without markers and without pieces of their partners."""
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
    """Whether a string holds a marker of ours whose partner is missing: a passage was cut."""
    return any(gap.orphans for gap in parse(string).gaps)


def close_cut_passages(chunk: str) -> str:
    """A chunk that a text splitter made, with the markers that it cut off put at its ends.

    What was cut is one passage again, known as altered unless all of its text is there.

    Args:
        chunk: the splitter's own output: passages that it cut begin, or end, where it does.
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
    """Without the start of a cut marker, where a word of ``text`` ends with it."""
    for size in range(len(marker) - 1, _SHORTEST_PIECE - 1, -1):
        if found := re.search(re.escape(marker[:size]) + r"(?=\s|\Z)", text):
            return text[: found.start()] + text[found.end() :]
    return text


def _without_tail_of(marker: str, text: str) -> str:
    """Without the end of a cut marker, where a word of ``text`` begins with it."""
    for start in range(1, len(marker) - _SHORTEST_PIECE + 1):
        if found := re.search(r"(?:(?<=\s)|\A)" + re.escape(marker[start:]), text):
            return text[: found.start()] + text[found.end() :]
    return text
