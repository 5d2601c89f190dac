"""Promotion: the passages that a question attends to most move into its final block.

Promoted passages are computed in the request, after the reused blocks and attending to all of them,
so that the model reads them in context, as in full attention. The mask is block mode's own. Each
costs as many tokens as it has, and choosing them one more forward of the question over the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockattn_rag.prompts.blocks import Block


def promoted(
    context: Sequence[Block], attention: Sequence[float], count: int
) -> tuple[list[Block], list[Block]]:
    """The context blocks that stay, and the passages that are promoted, the best last.

    Args:
        context: Context blocks of a prompt.
        attention: The question's attention to each of them, in order.
        count: Passages to promote; all if there are fewer.
    """
    places = [place for place, block in enumerate(context) if block.is_passage]
    places.sort(key=lambda place: -attention[place])
    best = places[:count]
    stay = [block for place, block in enumerate(context) if place not in best]
    return stay, [context[place] for place in reversed(best)]
