"""Relay attention: blocks are attended to where they lie, and read once for all requests.

A score depends only on the distance of query and key. So instead of rotating a block's keys by the
block's offset, the few queries are rotated the other way, once per block, and attend to the stored
keys as they are. The partial results are merged by their log-sum-exp, or, for one request on the
CPU, summed up block by block. No key is copied, rotated or rounded again, except those of small
blocks, which are joined (``Tuning.join_decode_tokens``).

Shapes: ``B`` rows of the batch, ``H`` query heads, ``K`` key-value heads, ``Q`` query tokens, ``T``
tokens of the tail (final block and generated tokens), ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import fold_heads
from blockattn_rag.attention.segments import SegmentTable
from blockattn_rag.attention.strategies import LayerInputs, Strategy, strategy_for
from blockattn_rag.attention.tuning import Tuning, tuning_of
from blockattn_rag.kv.context import Context
from blockattn_rag.kv.rope import RotaryLayout


class RelayPlan:
    """Which request attends to which block, for one batch. Made once, used by every layer.

    Every distinct block is read once per layer, for all requests that hold it, each of which sees
    the block at an offset of its own. A plan serves one forward at a time.

    Args:
        contexts: the placed blocks of each request.
        layouts: rotary layout per layer.
        device: where queries are.
        tuning: machine constants; default: those of the device.
    """

    def __init__(
        self,
        contexts: Sequence[Context],
        layouts: Sequence[RotaryLayout],
        device: torch.device,
        *,
        tuning: Tuning | None = None,
    ) -> None:
        self.num_layers = len(layouts)
        self.num_tokens = max(context.num_tokens for context in contexts)
        self.tuning = tuning or tuning_of(device)
        self._table = partial(SegmentTable, contexts, layouts, device)
        self.strategy: Strategy  # of the last forward
        self._serves: object = None  # the queries for which it was chosen

    @cached_property
    def prefill_table(self) -> SegmentTable:
        """What the queries of a prompt read."""
        return self._table(self.tuning.join_prefill_tokens)

    @cached_property
    def decode_table(self) -> SegmentTable:
        """What the query of an answer's single token reads."""
        if self.tuning.join_decode_tokens == self.tuning.join_prefill_tokens:
            return self.prefill_table  # joined once
        return self._table(self.tuning.join_decode_tokens)

    def attend(
        self,
        layer: int,
        query: Tensor,
        tail_key: Tensor,
        tail_value: Tensor,
        scale: float,
        tail_mask: Tensor | None,
    ) -> Tensor:
        """Attention of the final block's queries to all blocks and to the tail.

        The first layer of a forward chooses the strategy for all layers.

        Args:
            layer: index of the layer.
            query: ``[B, H, Q, D]``, rotated for the queries' own positions. ``B`` is a multiple of
                the number of requests: beams of one request follow one another.
            tail_key, tail_value: ``[B, K, T, D]``: final block and generated tokens.
            tail_mask: bool ``[B, 1, Q, T]``, True where seen; None: all.

        Returns:
            ``[B, H, Q, D]`` in the query's dtype.
        """
        batch, heads, tokens, _ = query.shape
        kv_heads = tail_key.shape[1]
        folded, mask = fold_heads(query, tail_mask, kv_heads)
        inputs = LayerInputs(layer, folded, tail_key, tail_value, scale, mask)
        serves = query.shape, query.dtype, mask is None
        if layer == 0 or serves != self._serves:
            table = self.decode_table if tokens == 1 else self.prefill_table
            self.strategy = strategy_for(table, inputs, tokens)
            self._serves = serves
        output = self.strategy.attend(inputs)
        return output.reshape(batch, heads, tokens, -1).to(query.dtype)
