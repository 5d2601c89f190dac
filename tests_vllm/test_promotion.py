"""The meter of attention by which passages are promoted."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag.server.vllm import attention
from blockattn_rag.server.vllm.attention import AttentionMeter, block_shares
from blockattn_rag.server.vllm.scheduler import Score

PAGE = 4
LENGTHS, PROMPT_TOKENS = (5, 7), 21


class _Pages:
    """Pages of a layer, in which tokens lie where requests put them."""

    def __init__(self, slots: int) -> None:
        self.keys = torch.randn(2, slots, 8)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys[:, slots], self.keys[:, slots]


def slots_of(pages: Sequence[int], tokens: int) -> Tensor:
    starts = PAGE * torch.tensor(pages)
    return (starts[:, None] + torch.arange(PAGE)).flatten()[:tokens]


def test_a_token_that_is_computed_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [
        SimpleNamespace(
            layer_name=str(index), impl=SimpleNamespace(scale=0.5, forward=lambda _, query: query)
        )
        for index in range(2)
    ]
    pages: list[Any] = [_Pages(100), _Pages(100)]
    meter = AttentionMeter(layers, pages, slots_of)
    queries = torch.randn(2, PROMPT_TOKENS, 4, 8)  # of each layer and token
    old, new = [3, 1, 4, 0, 5, 9], [2, 6, 8, 7, 10, 11]
    for one in pages:
        one.keys[:, slots_of(new, 24)] = one.keys[:, slots_of(old, 24)]
    final_tokens = PROMPT_TOKENS - sum(LENGTHS)
    said = []
    for used, start, stop in ((old, 12, 16), (new, 12, 18), (new, 18, 21)):
        meter.begin([Score("r", LENGTHS, final_tokens, used, start, stop)])
        # Tokens of another request come first.
        slots = torch.cat([torch.tensor([60, 61, 62]), slots_of(used, stop)[start:]])
        context = SimpleNamespace(slot_mapping={"0": slots, "1": slots})
        monkeypatch.setattr(attention, "get_forward_context", lambda context=context: context)
        for layer, of_layer in zip(layers, queries, strict=True):
            layer.impl.forward(layer, torch.cat([torch.randn(3, 4, 8), of_layer[start:stop]]))
        said.append(meter.end([]))
    assert said[:2] == [{}, {}]
    wanted = sum(
        block_shares(of_layer[12:], one.keys[:, slots_of(old, 12)], LENGTHS, 0.5)
        for of_layer, one in zip(queries, pages, strict=True)
    )
    assert said[2]["r"] == pytest.approx(wanted.tolist(), abs=1e-5)  # type: ignore[union-attr]
    assert sum(said[2]["r"]) == pytest.approx(2 * final_tokens)
