"""The block mask, from block lengths, for padded batches and for packed rows.

Token *i* may attend to token *j* if both are of one sample, *j* does not come after *i*, and *i* is
in the same block as *j* or in the final block (Block-Attention, arXiv 2409.15355, figure 1). Four
blocks of 2, 1, 2 and 3 tokens, the last one final::

                keys   a a b c c f f f
        queries a      x . . . . . . .
                a      x x . . . . . .
                b      . . x . . . . .
                c      . . . x . . . .
                c      . . . x x . . .
                f      x x x x x x . .
                f      x x x x x x x .
                f      x x x x x x x x

Full mode is the case of one block, the final one. All is computed from two numbers per token, its
sample and its block; FlexAttention evaluates them inside the kernel, without any n x n tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.context import Positions

FINAL = 0
"""Block number of a final block."""


class TokenLayout(NamedTuple):
    """Where each token belongs. Each ``[batch, tokens]``, int64.

    Args:
        sample: 1, 2, … within its row; 0 for padding.
        block: 1, 2, … within its sample; 0 for the final block (and padding).
        position_ids: see :func:`sample_positions`.
    """

    sample: Tensor
    block: Tensor
    position_ids: Tensor


def row_layout(
    samples: Sequence[Sequence[int]], length: int, positions: Positions = "reordered"
) -> TokenLayout:
    """The layout of one row (tensors ``[length]``) from the block lengths of the samples in it."""
    used = sum(map(sum, samples))
    if used > length:
        raise ValueError(f"samples of {used} tokens do not fit in a row of {length}")
    parts = []
    for number, lengths in enumerate(samples, start=1):
        block = torch.arange(1, len(lengths) + 1)
        block[-1] = FINAL
        block = block.repeat_interleave(torch.tensor(lengths))
        places = sample_positions(lengths, positions)
        parts.append(torch.stack([torch.full_like(block, number), block, places]))
    # Padding is 0 in all three: as the number of a sample, of a block, and as position.
    return TokenLayout(*F.pad(torch.cat(parts, dim=1), (0, length - used)))


def sample_positions(block_lengths: Sequence[int], positions: Positions = "reordered") -> Tensor:
    """Position ids ``[tokens]`` of a sample.

    ``"reordered"``: 0, 1, 2, … through the sample: every block is re-encoded to its place.
    ``"composite"`` (TurboRAG's name; the ablation "without position re-encoding"): every context
    block starts at 0, and the final block follows the total length of the context.
    """
    places = torch.arange(sum(block_lengths))
    if positions == "composite":
        lengths = torch.tensor(block_lengths)
        starts = lengths.cumsum(0) - lengths
        starts[-1] = 0
        places -= starts.repeat_interleave(lengths)
    return places


def block_mask(layout: TokenLayout, *, window: int | None = None) -> Tensor:
    """The mask as a bool tensor ``[batch, 1, tokens, tokens]``, True where attention is allowed.

    Args:
        window: sliding window of the layer, in tokens, the token itself included.
    """
    batch, length = layout.sample.shape
    allowed, device = mask_function(layout, window=window), layout.sample.device
    return create_mask(allowed, batch, None, length, length, device)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as a summand of attention scores: 0 where allowed, else the lowest number."""
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


def flex_block_mask(layout: TokenLayout, *, window: int | None = None) -> BlockMask:
    """The mask for FlexAttention: evaluated in the kernel, kept per tile of 128 x 128 tokens."""
    batch, length = layout.sample.shape
    allowed, device = mask_function(layout, window=window), layout.sample.device
    return create_block_mask(allowed, batch, None, length, length, device)


def mask_function(layout: TokenLayout, *, window: int | None = None) -> Callable[..., Tensor]:
    """``(batch, head, query, key) -> allowed``, all tensors, as FlexAttention's ``mask_mod``."""
    sample, block, _ = layout

    def allowed(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = (block[b, q] == block[b, k]) | (block[b, q] == FINAL)
        seen = (sample[b, q] == sample[b, k]) & (q >= k) & inside
        return seen if window is None else seen & (q - k < window)

    return allowed


class ModelMasks:
    """Builds the ``attention_mask`` by which a transformers model applies the block mask.

    A model passes a four-dimensional mask on unchanged to all its layers, those with a sliding
    window too, and takes one mask per layer type if it has several. So windows are applied here.

    Args:
        config: the model's text config.
        implementation: ``"eager"``, ``"sdpa"`` or ``"flex_attention"``.

    Raises:
        UnsupportedModelError: another implementation, or layers that attend in another way.
    """

    def __init__(self, config: Any, implementation: str) -> None:
        if implementation not in ("eager", "sdpa", "flex_attention"):
            raise UnsupportedModelError(
                f"found attention implementation {implementation!r}, which takes no block mask; "
                "use 'eager', 'sdpa' or 'flex_attention'"
            )
        self.implementation = implementation
        self.windows = _windows(config)

    def __call__(self, layout: TokenLayout, dtype: torch.dtype) -> Any:
        """The mask, or a dict of masks by layer type where the model has several types."""
        masks = {kind: self._mask(layout, window, dtype) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, layout: TokenLayout, window: int | None, dtype: torch.dtype) -> Any:
        if self.implementation == "flex_attention":
            return flex_block_mask(layout, window=window)
        mask = block_mask(layout, window=window)
        return additive(mask, dtype) if self.implementation == "eager" else mask


def _windows(config: Any) -> dict[str, int | None]:
    """Sliding window by layer type; None for layers that see everything."""
    config = config.get_text_config(decoder=True)  # of a model that also takes images
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
        raise UnsupportedModelError("found a model with bidirectional attention; expected causal")
    return {kind: known[kind] for kind in kinds}
