"""Strings with markers as passages, and the text around them by who wrote it."""

from __future__ import annotations

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import PLAIN, BlockPrompt, BlockTemplate, Origin, Span
from blockattn_rag.prompts.cut_passages import without_orphans
from blockattn_rag.prompts.markers import parse

MAX_MARKED = 4096
"""Marked passages in one message at most."""


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
