"""Ridge regression that fits a correction: a map from the KV of blocks to that of full attention.

The fit needs only passages, not questions, labels or gradients. Each prompt's context is encoded
twice, as blocks and with full attention. Only sums over tokens are kept, so memory use does not
grow with the number of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.correction import (
    NUM_PLACES,
    Correction,
    LayerCorrection,
    bare_states,
    places,
)
from blockattn_rag.prompts.sinks import NO_SINK, sink_ids

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Candidate penalties on the weights, relative to the mean square of the states."""

TokenBlocks = Sequence[Sequence[int]]
"""Token ids of a prompt's blocks."""

# Squared differences count as rounding errors below a fraction of the squared states: the larger of
# _ROUNDING (sums in float32) and _ROUNDING_EPS2 times the squared epsilon of the states' dtype.
_ROUNDING = 1e-9
_ROUNDING_EPS2 = 4

# Weight of the prior that the constants are 0, as a number of tokens.
_PRIOR_TOKENS = 1.0


class Sums:
    """Ridge-regression statistics of one layer, summed over tokens.

    The input x is a token's state in block mode, followed by a one-hot encoding of its place in the
    block. The target y is its state with full attention minus its state in block mode. The sums
    ``xx`` ``[K, D+P, D+P]``, ``xy`` ``[K, D+P, D]`` and ``yy`` ``[K, D]`` are float64, for K heads
    of size D and P places. The states are computed in ``dtype``.
    """

    def __init__(self, heads: int, size: int, dtype: torch.dtype = torch.float32) -> None:
        self._size = size
        self._rounding = max(_ROUNDING, _ROUNDING_EPS2 * torch.finfo(dtype).eps ** 2)
        inputs = size + NUM_PLACES
        self.xx = torch.zeros(heads, inputs, inputs, dtype=torch.float64)
        self.xy = torch.zeros(heads, inputs, size, dtype=torch.float64)
        self.yy = torch.zeros(heads, size, dtype=torch.float64)

    def add(self, block: Tensor, full: Tensor) -> None:
        """Add a block's states ``[K, n, D]`` in block mode and with full attention."""
        place = F.one_hot(places(block.shape[1]), NUM_PLACES).to(block)
        x = torch.cat([block, place.expand(len(block), -1, -1)], dim=-1)
        y = full - block
        self.xx += (x.mT @ x).double().cpu()
        self.xy += (x.mT @ y).double().cpu()
        self.yy += y.double().square().sum(dim=1).cpu()

    @property
    def differ(self) -> bool:
        """Whether blocks differ from full attention by more than rounding errors. In layer 0, they
        usually do not."""
        states = self.xx.diagonal(dim1=1, dim2=2)[:, : self._size]
        return bool(self.yy.sum() > self._rounding * states.sum())

    def solve(self, ridge: float) -> Tensor:
        """Return weights and constants ``[K, D+P, D]``. All are zero if ``differ`` is False."""
        if not self.differ:
            return torch.zeros_like(self.xy)
        penalty = torch.full_like(self.xx[:, 0], _PRIOR_TOKENS)
        squares = self.xx.diagonal(dim1=1, dim2=2)[:, : self._size]
        penalty[:, : self._size] = ridge * squares.mean(dim=1, keepdim=True)
        return torch.linalg.solve(self.xx + torch.diag_embed(penalty), self.xy)

    def left(self, solution: Tensor) -> Tensor:
        """Return the squared difference that remains after applying a solution, ``[K, D]``."""
        fitted = (solution * (self.xx @ solution)).sum(dim=1)
        return self.yy - 2 * (solution * self.xy).sum(dim=1) + fitted


def fit_correction(
    model: BlockModel,
    contexts: Sequence[TokenBlocks],
    held_out: Sequence[TokenBlocks],
    *,
    sink: str = NO_SINK,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> Correction:
    """Fit a correction for blocks that are encoded with ``sink``. Each prompt's first block is only
    context for the others. The penalty is selected on the held-out prompts."""
    every = [*contexts, *held_out]
    if not contexts or not held_out or any(len(context) < 2 for context in every):
        raise ValueError(
            f"Found {len(contexts)} prompts to fit and {len(held_out)} held-out prompts, expected "
            "at least one of each, all with a passage after the first block"
        )
    before = sink_ids(sink, model.tokenizer)
    fitted, tested = (_empty_sums(model) for _ in range(2))
    for number, context in enumerate(every):
        on_progress(number, len(every))
        _add_prompt(model, context, before, fitted if number < len(contexts) else tested)
    on_progress(len(every), len(every))
    return _correction(model, sink, _best(fitted, tested))


def no_correction(model: BlockModel, sink: str) -> Correction:
    return _correction(model, sink, [torch.zeros_like(sums.xy) for sums in _empty_sums(model)])


def _correction(model: BlockModel, sink: str, solutions: Sequence[Tensor]) -> Correction:
    layers = []
    for solution in solutions:
        parts = solution.float().split([solution.shape[1] - NUM_PLACES, NUM_PLACES], dim=1)
        layers.append(LayerCorrection(*(part.contiguous() for part in parts)))
    return Correction(tuple(layers), sink, model.fingerprint)


def _empty_sums(model: BlockModel) -> list[Sums]:
    return [
        Sums(keys.heads, keys.size + values.size, keys.dtype)
        for keys, values in model.profile.layer_outlines
    ]


def _add_prompt(
    model: BlockModel, context: TokenBlocks, before: Sequence[int], sums: Sequence[Sums]
) -> None:
    first, *others = whole = [list(ids) for ids in context]
    requests = [EncodeRequest(ids, str(i), "", before) for i, ids in enumerate(others)]
    blocks = {kv.digest: kv for batch in model.encode(requests) for kv in batch}
    [[full]] = model.encode([EncodeRequest([*chain.from_iterable(whole)], "", "")])
    start = len(first)
    with torch.inference_mode():
        for number, ids in enumerate(others):
            for layer, layer_sums in enumerate(sums):
                states = _bare(model, blocks[str(number)], layer, 0, len(ids))
                layer_sums.add(states, _bare(model, full, layer, start, start + len(ids)))
            start += len(ids)


def _bare(model: BlockModel, kv: BlockKV, layer: int, start: int, end: int) -> Tensor:
    """Return the unrotated states of the tokens ``start`` to ``end`` in a layer, ``[K, n, D]``."""
    keys, values = (states[:, start:end] for states in kv.states(layer))
    return bare_states(keys, values, model.profile.layouts[layer], range(start, end))


def _best(fitted: Sequence[Sums], tested: Sequence[Sums]) -> list[Tensor]:
    """Return the solutions for the best penalty on held-out prompts. Layers have equal weight."""

    def left(solutions: Sequence[Tensor]) -> float:
        pairs = zip(tested, solutions, strict=True)
        return sum(float(sums.left(s).sum() / sums.yy.sum()) for sums, s in pairs if sums.differ)

    return min(([sums.solve(ridge) for sums in fitted] for ridge in _RIDGES), key=left)
