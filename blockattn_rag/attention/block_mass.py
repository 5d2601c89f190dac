"""How much a question attends to each block. Decides which passages are promoted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import Partial, attend_plain, fold_heads, merge
from blockattn_rag.attention.segments import SegmentTable
from blockattn_rag.kv.context import Context
from blockattn_rag.kv.rope import RotaryLayout


class BlockMass:
    """Relay attention over one context that also measures the attention to each block.

    Args:
        context: Placed blocks of one request.
        layouts: Rotary layout per layer.
        device: Device of the queries.
    """

    def __init__(
        self, context: Context, layouts: Sequence[RotaryLayout], device: torch.device
    ) -> None:
        self.num_layers = len(layouts)
        self.num_tokens = context.num_tokens
        # With a limit of 0 tokens, no blocks are joined, so each segment is a single block.
        self._table = SegmentTable([context], layouts, device, 0)
        # Context index of each share. A block that occurs twice is one segment with two shares.
        places = {(b.kv.digest, b.kv.scales is None): list[int]() for b in context.blocks}
        for place, one in enumerate(context.blocks):
            places[one.kv.digest, one.kv.scales is None].append(place)
        self._places = [
            place
            for segment in self._table.segments
            for place in places[segment.blocks[0].kv.digest, segment.blocks[0].kv.scales is None]
        ]
        self._shares = torch.zeros(len(self._places), device=device)
        self._layers_seen = 0

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        mask: Tensor | None,
    ) -> Tensor:
        """Attend like ``RelayPlan.attend``, for a batch of one row."""
        batch, heads, tokens, _ = query.shape
        folded, repeated = fold_heads(query, mask, key.shape[1])
        rotated = self._table.rotated(layer, folded)
        parts, start = [], 0
        for segment, states in zip(self._table.segments, self._table.states(layer), strict=True):
            for _ in segment.readers:
                parts.append(attend_plain(rotated[start], *states, scale))
                start += 1
        shares = torch.stack([part.lse for part in parts]).softmax(dim=0)
        self._shares += shares.flatten(1).mean(dim=1)
        self._layers_seen += 1
        tail = attend_plain(folded, key, value, scale, repeated)
        output = merge([*(Partial(*(s[None] for s in part)) for part in parts), tail]).output
        return output.reshape(batch, heads, tokens, -1).to(query.dtype)

    def by_place(self) -> list[float]:
        """Share of each context block in the attention to all blocks, in prompt order.

        Each share is the mean over layers, heads and query tokens. The shares add up to 1.
        """
        found = [0.0] * len(self._places)
        for place, share in zip(self._places, self._shares.tolist(), strict=True):
            found[place] = share / self._layers_seen
        return found
