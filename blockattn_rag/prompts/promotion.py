"""Promotion: the best passages of a prompt move to the beginning of its final block.

Promoted passages are computed in the request, after the reused blocks and attending to all of them,
so that the model reads them in context, as in full attention. The mask is block mode's own. Each
costs as many tokens as it has.

    none         every passage is a block, as in the Block-Attention paper
    N            the first N passages: retrievers and rerankers put the best first
    last:N       the last N passages, for prompts that put the best last
    attention:N  the N passages to which the question attends most, which takes one more forward of
                 the question over the blocks
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from blockattn_rag.prompts.blocks import Block

NO_PROMOTION = "none"
_FORM = re.compile(r"(?:(last|attention):)?([1-9][0-9]{0,3})")


def check_promotion(promote: str | int) -> str:
    """The promotion in its written form; 0 is ``"none"``.

    Raises:
        ValueError: it is none of the forms above.
    """
    if isinstance(promote, int) and not isinstance(promote, bool):
        promote = str(promote) if promote else NO_PROMOTION
    if promote == NO_PROMOTION or (isinstance(promote, str) and _FORM.fullmatch(promote)):
        return promote
    raise ValueError(
        "promote must be 'none', a number of passages from 1 on, 'last:N' or 'attention:N'; "
        f"found {promote!r}"
    )


def by_attention(promote: str) -> bool:
    """Whether the passages are chosen by the question's attention to them."""
    return promote.startswith("attention:")


def promoted(
    context: Sequence[Block], promote: str, attention: Mapping[str, float] | None = None
) -> tuple[list[Block], list[Block]]:
    """The context blocks that stay, and the passages that are promoted, the best last.

    Args:
        context: the context blocks of a prompt.
        promote: how many, and by what; fewer passages than that are all promoted.
        attention: the question's attention to each block, by handle; for ``attention:N``.
    """
    if promote == NO_PROMOTION:
        return list(context), []
    by, _, count = promote.rpartition(":")
    places = [place for place, block in enumerate(context) if block.is_passage]
    if by == "attention":
        masses = attention or {}
        places.sort(key=lambda place: -masses.get(context[place].handle, 0.0))
    elif by == "last":
        places.reverse()
    best = places[: int(count)]
    stay = [block for place, block in enumerate(context) if place not in best]
    return stay, [context[place] for place in reversed(best)]
