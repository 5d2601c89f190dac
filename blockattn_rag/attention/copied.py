"""A weighted context on the copy path, where the keys of all blocks lie in one tensor.

Gives gradients, to queries, tail and weights, where they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockattn_rag.attention.context_merge import ContextMerge
from blockattn_rag.attention.kernels import Partial, fold_heads, merge
from blockattn_rag.attention.strategies import kernel_for
from blockattn_rag.kv.context import Context


class CopiedContexts:
    """Attends to joined contexts and their tails, and weighs each request's blocks after the first.

    Args:
        contexts: those of the requests; each fills the last of the joined columns.
        weight: of the blocks after the first.
        device: where queries are.
    """

    def __init__(
        self, contexts: Sequence[Context], weight: ContextMerge, device: torch.device
    ) -> None:
        self._weight = weight
        self._width = max(context.num_tokens for context in contexts)
        # The column of each request at which its first block ends.
        ends = [
            self._width - sum(b.kv.num_tokens for b in context.blocks if b.start)
            for context in contexts
        ]
        self._least, self._most = min(ends), max(ends)
        columns = torch.arange(self._width, device=device)
        self._is_context = columns >= torch.tensor(ends, device=device)[:, None]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        mask: Tensor | None,
    ) -> Tensor:
        """As ``RelayPlan.attend``, but keys, values and mask have the context's columns too, padded
        on the left."""
        batch, heads, tokens, _ = query.shape
        kv_heads, width = key.shape[1], self._width
        self._weight.check_layer(layer, heads, kv_heads)
        folded, repeated = fold_heads(query, mask, kv_heads)
        is_context = self._is_context.repeat_interleave(batch // len(self._is_context), dim=0)

        def part(
            query: Tensor, scale: float, start: int, stop: int | None, own: Tensor | None
        ) -> Partial:
            """Attention to some columns; of those, ``own`` are the request's, None: all."""
            columns = slice(start, stop)
            seen = None if repeated is None else repeated[..., columns]
            if own is not None:
                own = own[:, None, None, columns]
                seen = own if seen is None else seen & own
            states = key[:, :, columns], value[:, :, columns]
            return kernel_for(query, *states, seen)(query, *states, scale, seen)

        # Where requests differ, columns belong to the first block of one and not of another.
        differ = self._least < self._most
        first = part(folded, scale, 0, self._most, ~is_context if differ else None)
        rest = merge([first, part(folded, scale, width, None, None)])
        heated, scale = self._weight.heat(layer, folded, scale)
        context = part(heated, scale, self._least, width, is_context if differ else None)
        output = self._weight.combine(layer, context, rest)
        return output.reshape(batch, heads, tokens, -1).to(query.dtype)
