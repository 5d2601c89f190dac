"""The block mask of a batch, in the form that transformers models accept.

Token *i* may attend to token *j* if *j* does not come after *i*, and *i* is in the same block as
*j* or in the final block (Block-Attention, arXiv 2409.15355, figure 1). Four blocks of 2, 1, 2 and
3 tokens, the last one final::

                keys   a a b c c f f f
        queries a      x . . . . . . .
                a      x x . . . . . .
                b      . . x . . . . .
                c      . . . x . . . .
                c      . . . x x . . .
                f      x x x x x x . .
                f      x x x x x x x .
                f      x x x x x x x x

In full mode, there is only one block, the final block. With a sink
(:mod:`blockattn_rag.prompts.sinks`), the tokens of the sink come directly before each block, except
the first and the final block, and only that block attends to them. Blocks of 2, 2 and 2 tokens with
a sink of one token::

                keys   a a s b b f f
        queries a      x . . . . . .
                a      x x . . . . .
                s      . . x . . . .
                b      . . x x . . .
                b      . . x x x . .
                f      x x . x x x .
                f      x x . x x x x
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockattn_rag.errors import UnsupportedModelError

FINAL = 0
"""Block number of a final block, and of padding after it."""


class TokenLayout(NamedTuple):
    """Block, place and position of each token, as int64 ``[batch, tokens]``.

    Args:
        block: 1, 2, ... for context blocks; 0 for the final block; -2, -3, ... for the sink of
            block 2, 3, ....
        place: 0, 1, 2, ... in the sample. A sink does not shift places: it shares the places
            directly before its block, which are negative if it is longer than the preceding text.
            Sliding windows count places.
        position_ids: Positions that the model encodes.
    """

    block: Tensor
    place: Tensor
    position_ids: Tensor


def block_mask(layout: TokenLayout, *, window: int | None = None) -> Tensor:
    """The mask as a bool tensor ``[batch, 1, tokens, tokens]``, True where attention is allowed.

    Args:
        window: Sliding window of the layer, in places, including the token itself. Default: none.
    """
    block, place = layout.block[:, None], layout.place[:, None]
    query, key = block[..., :, None], block[..., None, :]
    same_block = query.abs() == key.abs()  # a sink has the negative number of its block
    by_final = (query == FINAL) & (key >= 0)
    allowed = torch.tril(same_block | by_final)
    if window is None:
        return allowed
    return allowed & (place[..., :, None] - place[..., None, :] < window)


class ModelMasks:
    """Builds the ``attention_mask`` with which a transformers model applies the block mask.

    Windows are applied here, because a model passes a four-dimensional mask unchanged to all its
    layers, even to layers with a sliding window. A model with several layer types accepts one mask
    per type.

    Args:
        config: The model's config.
        implementation: The model's attention: ``"eager"`` or ``"sdpa"``.

    Raises:
        UnsupportedModelError: The model has an unknown type of attention.
    """

    def __init__(self, config: Any, implementation: str) -> None:
        self._is_eager = implementation == "eager"
        config = config.get_text_config(decoder=True)  # for models that also accept images
        window = getattr(config, "sliding_window", None)
        default = "sliding_attention" if window else "full_attention"
        kinds = sorted(set(getattr(config, "layer_types", None) or [default]))
        known = {"full_attention": None, "sliding_attention": window}
        if unknown := set(kinds) - known.keys():
            raise UnsupportedModelError(
                f"found layers of type {', '.join(sorted(unknown))}; only full and sliding-window "
                "attention can be trained with a block mask"
            )
        if getattr(config, "use_bidirectional_attention", False):
            raise UnsupportedModelError(
                "found a model with bidirectional attention; expected causal attention"
            )
        self._windows = {kind: known[kind] for kind in kinds}

    def __call__(self, layout: TokenLayout, dtype: torch.dtype) -> Any:
        """The mask, or a dict of masks by layer type if the model has several types."""
        masks = {
            kind: self._as_taken(block_mask(layout, window=window), dtype)
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_taken(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The mask as eager attention expects it: 0 where visible, else the dtype's minimum."""
        if not self._is_eager:
            return mask
        lowest = torch.finfo(dtype).min
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)
