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

Full mode is the case of one block, the final one. With a sink (:mod:`blockattn_rag.prompts.sinks`),
each block but the first and the final one has the sink's tokens right before it, which that block
sees and nothing else does; blocks of 2, 2 and 2 tokens and a sink of one::

                keys   a a s b b f f
        queries a      x . . . . . .
                a      x x . . . . .
                s      . . x . . . .
                b      . . x x . . .
                b      . . x x x . .
                f      x x . x x x .
                f      x x . x x x x

All is computed from a few numbers per token; FlexAttention evaluates them inside the kernel,
without any n x n tensor.
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
        block: 1, 2, … within its sample; 0 for the final block (and padding); -2, -3, … for the
            sink of block 2, 3, ….
        place: in its sample, 0, 1, 2, …; a sink takes no places and has those right before its
            block, below 0 where it is longer than what precedes. Sliding windows count places.
        position_ids: what the model is told, see :func:`row_layout`.
    """

    sample: Tensor
    block: Tensor
    place: Tensor
    position_ids: Tensor


class BlockLengths(NamedTuple):
    """Tokens of each block of a sample, the final one last, and of the sink before each but the
    first and the final one."""

    blocks: Sequence[int]
    sink: int = 0

    @property
    def sinks(self) -> list[int]:
        """Tokens of the sink before each block."""
        last = len(self.blocks) - 1
        return [self.sink if 0 < number < last else 0 for number in range(last + 1)]

    @property
    def num_tokens(self) -> int:
        """Tokens of all, sinks included."""
        return sum(self.blocks) + sum(self.sinks)


def row_layout(
    samples: Sequence[BlockLengths], length: int, positions: Positions = "reordered"
) -> TokenLayout:
    """The layout of one row (tensors ``[length]``) from the block lengths of the samples in it.

    Args:
        samples: one after the other in the row.
        length: of the row; what is left is padding.
        positions: ``"reordered"``: positions are places, every block is re-encoded to its place.
            ``"composite"`` (TurboRAG's name; the ablation "without position re-encoding"): every
            context block starts at 0, and the final block follows the total length of the context.
    """
    used = sum(sample.num_tokens for sample in samples)
    if used > length:
        raise ValueError(f"samples of {used} tokens do not fit in a row of {length}")
    parts = [_sample_layout(number, one, positions) for number, one in enumerate(samples, start=1)]
    # Padding is 0 in all four: as the number of a sample, of a block, as place and position.
    return TokenLayout(*F.pad(torch.cat(parts, dim=1), (0, length - used)))


def _sample_layout(number: int, lengths: BlockLengths, positions: Positions) -> Tensor:
    """The fields of a ``TokenLayout`` for one sample: ``[4, tokens]``."""
    blocks: list[int] = []
    places: list[int] = []
    starts: list[int] = []  # of each token's block, as far as positions know
    start, last = 0, len(lengths.blocks) - 1
    for index, (own, sink) in enumerate(zip(lengths.blocks, lengths.sinks, strict=True)):
        block = FINAL if index == last else index + 1
        blocks += [-block] * sink + [block] * own
        places += range(start - sink, start + own)
        is_moved = positions == "composite" and index != last
        starts += [start if is_moved else 0] * (sink + own)
        start += own
    place = torch.tensor(places)
    sample = torch.full_like(place, number)
    return torch.stack([sample, torch.tensor(blocks), place, place - torch.tensor(starts)])


def block_mask(layout: TokenLayout, *, window: int | None = None) -> Tensor:
    """The mask as a bool tensor ``[batch, 1, tokens, tokens]``, True where attention is allowed.

    Args:
        window: sliding window of the layer, in places, the token itself included.
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
    sample, block, place, _ = layout
    owner = block.abs()  # a sink belongs to its block

    def allowed(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        by_final = (block[b, q] == FINAL) & (block[b, k] >= 0)
        seen = (sample[b, q] == sample[b, k]) & (q >= k) & ((owner[b, q] == owner[b, k]) | by_final)
        return seen if window is None else seen & (place[b, q] - place[b, k] < window)

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
