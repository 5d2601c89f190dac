"""Attention of chosen tokens in a copied context, for recomputation; see ``model.recompute``."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import (
    MOST_SCORES,
    AttentionInputs,
    attend,
    attend_causal,
    attend_plain,
    capped,
    fold_heads,
    fold_sinks,
    kernel_for,
)
from blockattn_rag.attention.merge import merge, with_sinks

_MOST_ROWS = 512
"""Maximum number of recomputed tokens per masked chunk. A larger number needs fewer kernel
launches, but computes more scores that are masked out."""


class ChosenAttention:
    """Attention of chosen tokens in a context to all earlier tokens and themselves.

    Attention is computed in chunks, so that memory does not grow with the number of tokens. Without
    a window, all tokens of a chunk attend to every key before the chunk, which needs no mask.

    ``chosen``: Sorted indices of the tokens in the context. ``places``: The same indices, as a
    tensor on the device. ``windows``: Sliding window of each layer. ``has_causal_kernel``: Whether
    ``attend_causal`` may be used.
    """

    takes_mask = False

    def __init__(
        self,
        chosen: Sequence[int],
        places: Tensor,
        windows: Mapping[int, int | None],
        *,
        has_causal_kernel: bool,
    ) -> None:
        self._chosen, self._places, self._windows = chosen, places, windows
        self._keys = torch.arange(chosen[-1] + 1, device=places.device)
        self._has_causal_kernel = has_causal_kernel

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """See ``RelayPlan.attend``. ``inputs`` contain the context's keys and values."""
        query, key, value, *_ = inputs
        window, outputs = self._windows[layer], []
        # Some models compute only the last tokens in layers that store no keys and values.
        start = skipped = len(self._chosen) - query.shape[2]
        while start < len(self._chosen):
            run = self._run(start)
            is_causal = self._has_causal_kernel and run >= _MOST_ROWS
            rows = run if is_causal else self._rows(start, inputs, window)
            end = start + rows
            first = 0 if window is None else max(0, self._chosen[start] + 1 - window)
            seen = slice(first, self._chosen[end - 1] + 1)
            part = query[:, :, start - skipped : end - skipped]
            states = inputs._replace(query=part, key=key[:, :, seen], value=value[:, :, seen])
            if is_causal:
                output = attend_causal(*states[:4])
            else:
                output = self._masked(start, first, states, window).reshape(*part.shape[:3], -1)
            outputs.append(output.to(query.dtype))
            start = end
        return torch.cat(outputs, dim=2)

    def _run(self, start: int) -> int:
        """Length of the run of consecutive chosen tokens that begins at ``start``."""
        places = self._chosen
        sizes = range(1, len(places) - start)
        return 1 + bisect_right(sizes, 0, key=lambda n: places[start + n] - places[start] - n)

    def _rows(self, start: int, inputs: AttentionInputs, window: int | None) -> int:
        """Number of tokens in the chunk that begins at ``start``."""
        query, key, value, *_ = inputs
        first, most = self._chosen[start], min(_MOST_ROWS, len(self._chosen) - start)
        heads, groups = query.shape[1], query.shape[1] // key.shape[1]
        keeps_scores = inputs.cap is not None or kernel_for(query, key, value) is attend_plain
        scored, masked = 0, first
        if window is not None:
            scored = masked = max(0, first + 1 - window)
            # In a longer chunk, most scores would be masked out.
            most = min(most, bisect_left(self._chosen, first + window, lo=start) - start)

        def elements(rows: int) -> int:
            """Number of elements in the mask, or in the scores if the kernel stores them."""
            end = self._chosen[start + rows - 1] + 1
            return rows * (heads * (end - scored) if keeps_scores else groups * (end - masked))

        return max(1, bisect_right(range(1, most + 1), MOST_SCORES, key=elements))

    def _masked(
        self, start: int, first: int, inputs: AttentionInputs, window: int | None
    ) -> Tensor:
        """Attention of the chunk at ``start`` to the keys from ``first`` to the chunk's end."""
        query, key, value, scale, _, cap, sinks = inputs
        places = self._places[start : start + query.shape[2], None]
        # Keys before the chunk need no mask, because all queries attend to them.
        seen = self._chosen[start] - first if window is None else 0
        keys = self._keys[first + seen : first + key.shape[2]]
        visible = _visible(places, keys, window)
        folded, mask = fold_heads(query, visible[None, None], key.shape[1])
        result = attend(folded, key[:, :, seen:], value[:, :, seen:], scale, mask, cap)
        if seen:
            before = attend(folded, key[:, :, :seen], value[:, :, :seen], scale, None, cap)
            result = merge([before, result])
        own = None if sinks is None else fold_sinks(sinks, query.shape[2], key.shape[1])
        return with_sinks(result, own)


class MeasuredAttention(ChosenAttention):
    """Attention of the tokens after a context, which also sums each context token's weights.

    The weights are computed in float32, because they decide which tokens are chosen.

    ``before``, ``after``: Number of tokens in the context, and after it. ``layers``: Layer indices.
    """

    def __init__(
        self,
        before: int,
        after: int,
        windows: Mapping[int, int | None],
        layers: Collection[int],
        device: torch.device,
    ) -> None:
        places = torch.arange(before, before + after, device=device)
        super().__init__(range(before, before + after), places, windows, has_causal_kernel=False)
        self.total = torch.zeros(before, dtype=torch.float32, device=device)
        self._layers = layers

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """See ``RelayPlan.attend``. ``inputs`` contain the keys and values of context and tail."""
        if layer not in self._layers:
            return super().attend(layer, inputs)
        query, key, value, scale, _, cap, sinks = inputs
        keys, before, outputs = key.float().mT, len(self.total), []
        heads, tokens = query.shape[1:3]
        step = max(1, MOST_SCORES // (heads * keys.shape[-1]))
        for start in range(0, tokens, step):
            end = min(start + step, tokens)
            folded = fold_heads(query[:, :, start:end].float(), None, key.shape[1])[0]
            scores = folded @ keys[..., : before + end] * scale
            if cap is not None:
                scores = capped(scores, cap)
            scores = scores.unflatten(2, (-1, end - start))
            places, seen = self._places[start:end, None], self._keys[: before + end]
            hidden = ~_visible(places, seen, self._windows[layer])
            weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
            if sinks is not None:
                own = sinks.float().view(key.shape[1], -1, 1)
                weights *= (scores.logsumexp(-1) - own).sigmoid().unsqueeze(-1)
            weights = weights.flatten(2, 3)
            self.total += weights[..., :before].sum(dim=(0, 1, 2)) / (heads * tokens)
            output = weights.to(value.dtype) @ value[:, :, : before + end]
            outputs.append(output.reshape(*query.shape[:2], end - start, -1))
        return torch.cat(outputs, dim=2)


def _visible(places: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Mask ``[tokens, keys]``: True if a token at ``places`` ``[tokens, 1]`` attends to a key."""
    visible = places >= keys
    return visible if window is None else visible & (places - keys < window)
