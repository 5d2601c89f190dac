"""Fitting a correction: ridge regression from blocks' keys and values to those of full attention.

Needs passages alone: no question, no label, no gradient. Each prompt's context is computed twice,
as blocks and as one; what is summed up over its tokens are the products of which the least squares
consist, so memory does not grow with the number of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Penalties on the weights, relative to the mean square of the states; held-out prompts choose."""

TokenBlocks = Sequence[Sequence[int]]
"""Token ids of a prompt's blocks."""

# Squared differences below this share of the states' squares are rounding: of sums in 32 bits, and
# of states that are kept in so many squared units of their dtype's precision.
_ROUNDING = 1e-9
_ROUNDING_EPS2 = 4

# A constant of a place counts as if one token there had shown none.
_PRIOR_TOKENS = 1.0


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well a correction fits prompts that it was not fitted to.

    ``explained``: the share of the squared difference between blocks' and full attention's states
    that it takes away, in each layer, of keys and of values, 0 where they do not differ; ``ridge``:
    the penalty chosen; ``tokens``: of the passages that it was fitted to.
    """

    ridge: float
    tokens: int
    keys_explained: tuple[float, ...]
    values_explained: tuple[float, ...]


class _Sums:
    """Sums over tokens of one layer, of inputs x (states and place) and differences y: ``xx``
    ``[K, D+P, D+P]``, ``xy`` ``[K, D+P, D]``, ``yy`` ``[K, D]``, float64.

    Args:
        heads: K.
        size: D.
        dtype: in which the states are computed.
    """

    def __init__(self, heads: int, size: int, dtype: torch.dtype = torch.float32) -> None:
        self._size = size
        self._rounding = max(_ROUNDING, _ROUNDING_EPS2 * torch.finfo(dtype).eps ** 2)
        inputs = size + NUM_PLACES
        self.xx = torch.zeros(heads, inputs, inputs, dtype=torch.float64)
        self.xy = torch.zeros(heads, inputs, size, dtype=torch.float64)
        self.yy = torch.zeros(heads, size, dtype=torch.float64)

    def add(self, block: Tensor, full: Tensor) -> None:
        """States of one block ``[K, n, D]``, as blocks and as full attention compute them."""
        place = F.one_hot(places(block.shape[1]), NUM_PLACES).to(block)
        x = torch.cat([block, place.expand(len(block), -1, -1)], dim=-1)
        y = full - block
        self.xx += (x.mT @ x).double().cpu()
        self.xy += (x.mT @ y).double().cpu()
        self.yy += y.double().square().sum(dim=1).cpu()

    @property
    def differ(self) -> bool:
        """Whether blocks differ from full attention by more than rounding; in layer 0 they mostly
        do not."""
        states = self.xx.diagonal(dim1=1, dim2=2)[:, : self._size]
        return bool(self.yy.sum() > self._rounding * states.sum())

    def solve(self, ridge: float) -> Tensor:
        """Weights and constants ``[K, D+P, D]``; zeros where nothing differs."""
        if not self.differ:
            return torch.zeros_like(self.xy)
        penalty = torch.full_like(self.xx[:, 0], _PRIOR_TOKENS)
        squares = self.xx.diagonal(dim1=1, dim2=2)[:, : self._size]
        penalty[:, : self._size] = ridge * squares.mean(dim=1, keepdim=True)
        return torch.linalg.solve(self.xx + torch.diag_embed(penalty), self.xy)

    def left(self, solution: Tensor) -> Tensor:
        """The squared difference that a solution leaves, ``[K, D]``."""
        fitted = (solution * (self.xx @ solution)).sum(dim=1)
        return self.yy - 2 * (solution * self.xy).sum(dim=1) + fitted


def fit_correction(
    model: BlockModel,
    contexts: Sequence[TokenBlocks],
    held_out: Sequence[TokenBlocks],
    *,
    sink: str = NO_SINK,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Correction, FitReport]:
    """Fit a correction of blocks that are encoded after ``sink``.

    Args:
        model: the model.
        contexts: of each prompt, the token ids of its blocks; the first is the prompt's beginning
            and is not corrected.
        held_out: further prompts, which choose the penalty and are reported on.
        sink: prefix tokens that blocks but the first are encoded with.
        on_progress: called with prompts done and all prompts.

    Raises:
        ValueError: no prompt to fit or none held out, or one without a block behind its first.
        ContextOverflowError: a context is longer than the model's context window.
    """
    every = [*contexts, *held_out]
    if not contexts or not held_out or any(len(context) < 2 for context in every):
        raise ValueError(
            "a correction is fitted to one prompt at least and judged by another, each with a "
            f"passage behind its beginning; found {len(contexts)} and {len(held_out)} prompts"
        )
    before = sink_ids(sink, model.tokenizer)
    fitted, tested = (_empty_sums(model) for _ in range(2))
    tell = on_progress or (lambda *_: None)
    for number, context in enumerate(every):
        tell(number, len(every))
        _add_prompt(model, context, before, fitted if number < len(contexts) else tested)
    tell(len(every), len(every))
    ridge, solutions = _best(fitted, tested)
    correction = Correction(
        tuple(_layer(solution) for solution in solutions), sink, model.fingerprint
    )
    key_sizes = [keys.size for keys, _ in model.profile.layer_outlines]
    of_keys, of_values = _explained(tested, solutions, key_sizes)
    tokens = sum(len(ids) for context in contexts for ids in context[1:])
    return correction, FitReport(ridge, tokens, of_keys, of_values)


def no_correction(model: BlockModel, sink: str) -> Correction:
    """The correction that changes nothing."""
    layers = []
    for keys, values in model.profile.layer_outlines:
        size = keys.size + values.size
        weight, bias = (torch.zeros(keys.heads, rows, size) for rows in (size, NUM_PLACES))
        layers.append(LayerCorrection(weight, bias))
    return Correction(tuple(layers), sink, model.fingerprint)


def _empty_sums(model: BlockModel) -> list[_Sums]:
    return [
        _Sums(keys.heads, keys.size + values.size, keys.dtype)
        for keys, values in model.profile.layer_outlines
    ]


def _add_prompt(
    model: BlockModel,
    context: TokenBlocks,
    before: Sequence[int],
    sums: Sequence[_Sums],
) -> None:
    first, *others = whole = [list(ids) for ids in context]
    requests = [EncodeRequest(ids, str(i), "", before) for i, ids in enumerate(others)]
    blocks = {kv.digest: kv for batch in model.encode(requests) for kv in batch}
    [[full]] = model.encode([EncodeRequest([*chain.from_iterable(whole)], "", "")])
    start = len(first)
    with torch.inference_mode():
        for number, ids in enumerate(others):
            for layer, one in enumerate(sums):
                states = _bare(model, blocks[str(number)], layer, 0, len(ids))
                one.add(states, _bare(model, full, layer, start, start + len(ids)))
            start += len(ids)


def _bare(model: BlockModel, kv: BlockKV, layer: int, start: int, end: int) -> Tensor:
    """Tokens ``start`` to ``end`` of one layer, without rotation ``[K, n, D]``."""
    keys, values = (states[:, start:end] for states in kv.states(layer))
    return bare_states(keys, values, model.profile.layouts[layer], range(start, end))


def _best(fitted: Sequence[_Sums], tested: Sequence[_Sums]) -> tuple[float, list[Tensor]]:
    """The penalty that leaves least in the held-out prompts, each layer weighted alike, and its
    solutions."""

    def left(solutions: Sequence[Tensor]) -> float:
        pairs = zip(tested, solutions, strict=True)
        return sum(float(sums.left(s).sum() / sums.yy.sum()) for sums, s in pairs if sums.differ)

    by_ridge = {ridge: [sums.solve(ridge) for sums in fitted] for ridge in RIDGES}
    best = min(RIDGES, key=lambda ridge: left(by_ridge[ridge]))
    return best, by_ridge[best]


def _layer(solution: Tensor) -> LayerCorrection:
    weight, bias = solution.float().split([solution.shape[1] - NUM_PLACES, NUM_PLACES], dim=1)
    return LayerCorrection(weight.contiguous(), bias.contiguous())


def _explained(
    tested: Sequence[_Sums], solutions: Sequence[Tensor], key_sizes: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The shares of keys' and of values' squared differences that are taken away, by layer."""
    found: tuple[list[float], list[float]] = ([], [])
    for sums, solution, size in zip(tested, solutions, key_sizes, strict=True):
        left, all_ = sums.left(solution), sums.yy
        for shares, part in zip(found, (slice(size), slice(size, None)), strict=True):
            differs = sums.differ and bool(all_[:, part].any())
            shares.append(1 - float(left[:, part].sum() / all_[:, part].sum()) if differs else 0.0)
    return tuple(found[0]), tuple(found[1])
