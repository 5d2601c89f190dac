"""Relay attention with sliding windows, soft caps and sinks, compared with a reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention.kernels import attend, attend_plain
from blockattn_rag.attention.merge import Partial
from blockattn_rag.attention.relay import JoinLimits, LayerReads, RelayPlan
from blockattn_rag.attention.segments import Segment, SegmentTable
from blockattn_rag.kv.context import Context, Positions, place
from blockattn_rag.kv.rope import shift_positions
from tests.attention.test_kernels import KV_HEADS, SIZE, random
from tests.attention.test_relay import HEADS, LAYOUT, ORDERS, RELAY_BUDGET, blocks_of, inputs_of

pytestmark = pytest.mark.usefixtures("device", "no_gradients")
LENGTHS = [40, 1, 17, 60]
SCALE, GROUPS = 0.25, HEADS // KV_HEADS


def written_out(
    query: Tensor,
    context: Context,
    tail: tuple[Tensor, Tensor],
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Reference attention of one request, with moved keys, token by token."""
    keys = [shift_positions(b.kv.keys[0].double(), b.shift, LAYOUT) for b in context.blocks]
    key = torch.cat([*keys, tail[0].double()], dim=1).repeat_interleave(GROUPS, 0)
    value = torch.cat([*(b.kv.values[0] for b in context.blocks), tail[1]], dim=1).double()
    value = value.repeat_interleave(GROUPS, 0)
    outputs = []
    for row in range(query.shape[1]):
        end = key.shape[1] - query.shape[1] + row + 1  # end of the visible keys
        first = 0 if window is None else max(0, end - window)
        scores = (query[:, row, None].double() @ key[:, first:end].mT)[:, 0] * SCALE
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        weights = scores.softmax(-1)[:, : end - first]
        outputs.append((weights[:, None] @ value[:, first:end])[:, 0])
    return torch.stack(outputs, dim=1)


def error_of(
    orders: list[list[int]],
    tokens: int,
    *,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    joins: int = 0,
    tail_tokens: int = 8,
    positions: Positions = "reordered",
) -> float:
    """Maximum error over all requests and query tokens."""
    blocks = blocks_of(LENGTHS, layers=1)
    contexts = [place([blocks[i] for i in order], positions) for order in orders]
    plan = RelayPlan(
        contexts,
        [LAYOUT],
        torch.get_default_device(),
        joins=JoinLimits(joins, joins),
        layers={3: LayerReads(0, window)},
    )
    mask = torch.ones(tokens, tail_tokens, dtype=torch.bool).tril(tail_tokens - tokens)
    if window is not None:
        mask &= ~mask.new_ones(mask.shape).tril(tail_tokens - tokens - window)
    seen = None if tokens == 1 and mask.all() else mask
    inputs = inputs_of(len(orders), tokens, tail_tokens, seen, spread=3.0)
    found = plan.attend(3, inputs._replace(cap=cap, sinks=sinks))
    rows = zip(inputs.query, contexts, zip(inputs.key, inputs.value, strict=True), strict=True)
    expected = [written_out(*row, window, cap, sinks) for row in rows]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("joins", [0, 50], ids=["one by one", "joined"])
def test_windows_are_exact_to_a_token(joins: int, tokens: int, orders: list[list[int]]) -> None:
    # Ends of the tail and of the blocks in the first order, counted from its end.
    ends = [8, 60, 77, 78, 118]
    edges = {edge + off for edge in ends for off in (-3, 0, 1)}
    for window in sorted({1, 2, *edges, 500}):
        error = error_of(orders, tokens, window=window, joins=joins)
        assert error <= 3 * RELAY_BUDGET, window


def test_windows_count_tokens_and_not_key_positions() -> None:
    for window in (9, 61, 70):
        error = error_of([[0, 1, 2, 3], [2, 2]], 6, window=window, joins=50, positions="composite")
        assert error <= 3 * RELAY_BUDGET


def test_blocks_outside_the_window_are_not_read() -> None:
    context = place(blocks_of(LENGTHS, layers=1))
    limits = JoinLimits(50, 1)
    plan = RelayPlan([context], [LAYOUT], torch.get_default_device(), joins=limits)

    def read(window: int) -> list[list[int]]:
        segments = plan.table(6, window).segments
        return [[block.kv.num_tokens for block in segment.blocks] for segment in segments]

    # The first query attends to itself and to the `window - 1` tokens before it.
    assert read(1) == []
    assert read(2) == read(61) == [[60]]
    assert read(62) == read(78) == [[60], [17]]
    assert read(79) == [[60], [1, 17]]
    assert read(1000) == [[60], [40, 1, 17]]
    views = SegmentTable([context], [LAYOUT], torch.device("cpu"), 1, 30).views(5, 1, 2)
    assert [view.first for view in views] == [60 - (29 - 5)]
    assert views[0].mask is None


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("tokens", [1, 6])
def test_a_long_tail_hides_blocks(tokens: int, orders: list[list[int]]) -> None:
    for window in (20, 40, 45):
        error = error_of(orders, tokens, window=window, tail_tokens=45)
        assert error <= 3 * RELAY_BUDGET, window


@pytest.mark.parametrize("tokens", [1, 6])
def test_blocks_hidden_by_a_tail_are_not_read(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "states", None)  # raises if called
    assert error_of([[0, 1, 2, 3]], tokens, window=39, tail_tokens=45) <= 3 * RELAY_BUDGET
    with pytest.raises(TypeError):
        error_of([[0, 1, 2, 3]], tokens, window=46, tail_tokens=45)


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("window", [None, 70])
def test_caps_and_sinks_are_exact(window: int | None, tokens: int, orders: list[list[int]]) -> None:
    sinks = 3 * random(HEADS, seed=10)
    budget = 3 * RELAY_BUDGET
    assert error_of(orders, tokens, window=window, cap=2.0) <= budget
    assert error_of(orders, tokens, window=window, sinks=sinks) <= budget
    assert error_of(orders, tokens, window=window, cap=2.0, sinks=sinks) <= budget


@pytest.mark.parametrize("mask", [None, (1, 1, 7, 9), (1, 1, 1, 9)])
def test_the_plain_kernel_bounds_the_scores_in_memory(
    mask: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = (random(2, 2, n, SIZE, seed=n) for n in (7, 9, 9))
    seen = None if mask is None else random(*mask) > 0
    expected = attend(query, key, value, 1.0, seen, cap=2.0)
    scores = []

    def counted(query: Tensor, key: Tensor, *others: Any) -> Partial:
        scores.append(query[..., 0].numel() * key.shape[2])
        return attend_plain(query, key, *others)

    monkeypatch.setattr("blockattn_rag.attention.kernels.attend_plain", counted)
    monkeypatch.setattr("blockattn_rag.attention.kernels.MOST_SCORES", 80)
    found = attend(query, key, value, 1.0, seen, cap=2.0)
    assert scores == [72, 72, 72, 36]
    torch.testing.assert_close(found, expected)
