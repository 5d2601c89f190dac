"""Measures how much a prompt's final block attends to each context block while it is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from blockattn_rag.server.vllm.pages import LayerPages
from blockattn_rag.server.vllm.scheduler import Score

_MOST_SCORES = 1 << 26
"""Attention scores computed at once."""

Slots = Callable[[Sequence[int], int], Tensor]
"""Slots of the first tokens in a request's pages."""


@dataclass(slots=True)
class _Measured:
    """Attention of a final block so far.

    Args:
        sums: Attention to each context block, summed over tokens and layers.
        tokens: Number of measured tokens in each layer.
    """

    sums: Tensor
    tokens: list[int] = field(default_factory=list)


class AttentionMeter:
    """Measures attention in the layers of one rank.

    For each token, layer and query head, the attention to a context block is its share of the
    softmax over the blocks' log-sum-exps, as in ``attention.BlockMass``. Keys are read from pages.
    After a preemption, tokens are not counted twice.

    Args:
        layers: vLLM's ``Attention`` layers, whose ``impl.forward`` is wrapped.
    """

    def __init__(self, layers: Sequence[Any], pages: Sequence[LayerPages], slots: Slots) -> None:
        self._pages = pages
        self._slots = slots
        self._scores: Sequence[Score] = ()
        self._rows: dict[str, int | None] = {}
        self._measured: dict[str, _Measured] = {}
        for index, layer in enumerate(layers):
            layer.impl.forward = partial(self._forward, index, layer.impl.forward)

    def begin(self, scores: Sequence[Score]) -> None:
        """Begin a step, which computes tokens of these requests."""
        self._scores, self._rows = scores, {}

    def end(self, finished: Collection[str]) -> dict[str, tuple[float, ...]]:
        """End a step, and forget finished requests.

        Returns:
            Attention to each context block by request id, for final blocks whose last token was
            computed in this step. Sums over layers and tokens of the mean over this rank's heads.
        """
        complete = {}
        for score in self._scores:
            measured = self._measured.get(score.request_id)
            if measured is not None and {*measured.tokens} == {score.final_tokens}:
                complete[score.request_id] = tuple(measured.sums.tolist())
        for request_id in [*finished, *complete]:
            self._measured.pop(request_id, None)
        self.begin(())
        return complete

    def _forward(
        self, index: int, forward: Any, layer: Any, query: Tensor, *others: Any, **named: Any
    ) -> Any:
        output = forward(layer, query, *others, **named)
        for score in self._scores:
            self._measure(index, layer, query, score)
        return output

    def _measure(self, index: int, layer: Any, query: Tensor, score: Score) -> None:
        """Measure the tokens of a request's final block in a step's queries ``[tokens, heads,
        head_size]``."""
        measured = self._measured.get(score.request_id)
        if measured is None:
            sums = torch.zeros(len(score.lengths), device=query.device)
            measured = _Measured(sums, [0] * len(self._pages))
            self._measured[score.request_id] = measured
        first = sum(score.lengths) + measured.tokens[index]
        if not score.start <= first < score.stop or (row := self._row(layer, score)) is None:
            return
        queries = query[row + first - score.start : row + score.stop - score.start]
        keys, _ = self._pages[index].read(self._slots(score.pages, sum(score.lengths)))
        measured.sums += block_shares(queries, keys, score.lengths, layer.impl.scale)
        measured.tokens[index] += score.stop - first

    def _row(self, layer: Any, score: Score) -> int | None:
        """Row of a request's first token of the step. None if the step does not contain it."""
        if score.request_id not in self._rows:
            slots = get_forward_context().slot_mapping
            own = self._slots(score.pages, score.start + 1)[-1]
            found = (slots[layer.layer_name] == own).nonzero().flatten().tolist()
            self._rows[score.request_id] = found[0] if found else None
        return self._rows[score.request_id]


def block_shares(query: Tensor, keys: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Attention of tokens to each context block: mean over heads, sum over tokens; float32.

    Args:
        query: Queries ``[tokens, heads, head_size]``.
        keys: Keys of all context blocks ``[kv_heads, context_tokens, head_size]``.
        lengths: Tokens of each block.
    """
    tokens, heads, size = query.shape
    grouped = query.float().view(tokens, keys.shape[0], -1, size)
    shares = torch.zeros(len(lengths), device=query.device)
    for part in torch.split(grouped, max(1, _MOST_SCORES // (heads * keys.shape[1]))):
        scores = torch.einsum("tkgd,knd->tkgn", part, keys.float()) * scale
        sums = torch.stack([block.logsumexp(-1) for block in torch.split(scores, [*lengths], -1)])
        shares += sums.softmax(0).flatten(2).mean(2).sum(1)
    return shares
