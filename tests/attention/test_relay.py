"""Relay attention over blocks against attention written out in float64 with moved keys."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention import relay as relay_plan
from blockattn_rag.attention.kernels import attend_jointly, merge
from blockattn_rag.attention.relay import RelayPlan
from blockattn_rag.kv.block_kv import BlockKV, Context, place
from blockattn_rag.kv.rope import NO_ROTATION, RotaryLayout, rotate, shift_positions
from tests.attention.test_kernels import KV_HEADS, SIZE, budget, exact, random

HEADS = 6
pytestmark = pytest.mark.usefixtures("device", "no_gradients")
FREQUENCIES = 10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
LAYOUT = RotaryLayout(FREQUENCIES, "half")
OTHER_LAYOUTS = {
    "interleaved": RotaryLayout(FREQUENCIES, "interleaved"),
    "partial": RotaryLayout(FREQUENCIES[: SIZE // 4], "half"),
    "nope": NO_ROTATION,
}


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """As in every answer."""
    with torch.no_grad():
        yield


def blocks_of(lengths: list[int], layers: int = 2) -> list[BlockKV]:
    def states(block: int, length: int, layer: int) -> Tensor:
        return random(KV_HEADS, length, SIZE, seed=100 * block + layer)

    return [
        BlockKV(
            keys=tuple(states(i, n, layer) for layer in range(layers)),
            values=tuple(states(i, n, layer + 50) for layer in range(layers)),
            token_ids=torch.zeros(n, dtype=torch.long),
            fingerprint="",
            digest=str(i),
            handle="",
        )
        for i, n in enumerate(lengths)
    ]


def by_moving_the_keys(
    query: Tensor,
    context: Context,
    tail: tuple[Tensor, Tensor],
    mask: Tensor | None,
    layer: int,
    layout: RotaryLayout,
) -> Tensor:
    """One request's attention the ordinary way: keys moved and joined, heads repeated, float64."""
    keys = [shift_positions(b.kv.keys[layer].double(), b.shift, layout) for b in context.blocks]
    key = torch.cat([*keys, tail[0].double()], dim=1)
    value = torch.cat([*(b.kv.values[layer] for b in context.blocks), tail[1]], dim=1)
    groups = HEADS // KV_HEADS
    seen = None
    if mask is not None:
        before = torch.ones(*mask.shape[:-1], context.num_tokens, dtype=torch.bool)
        seen = torch.cat([before, mask], dim=-1)
    key, value = key.repeat_interleave(groups, 0)[None], value.repeat_interleave(groups, 0)[None]
    return exact(query[None], key, value, 0.25, seen).output[0]


# Rotating in float32 adds one rounding of each product to the scores of the exact attention.
RELAY_BUDGET = 2 * budget(torch.float32, 200)


ORDERS = {
    "one request": [[0, 1, 2, 3]],
    "one block twice": [[2, 0, 2]],
    "a batch that shares blocks": [[0, 1, 2, 3], [3, 0], [], [2, 2, 1]],
}


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("layout", [LAYOUT, NO_ROTATION], ids=["rotary", "nope"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_turning_queries_equals_moving_keys(
    layout: RotaryLayout, tokens: int, orders: list[list[int]]
) -> None:
    blocks = blocks_of([40, 1, 17, 60])
    contexts = [place([blocks[i] for i in order]) for order in orders]
    query = random(len(orders), HEADS, tokens, SIZE, seed=7)
    tail_key = random(len(orders), KV_HEADS, tokens, SIZE, seed=8)
    tail_value = random(len(orders), KV_HEADS, tokens, SIZE, seed=9)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    plan = RelayPlan(contexts, [layout, layout], torch.get_default_device())
    found = plan.attend(1, query, tail_key, tail_value, 0.25, mask.expand(len(orders), -1, -1, -1))
    for row, context in enumerate(contexts):
        tail = tail_key[row], tail_value[row]
        expected = by_moving_the_keys(query[row], context, tail, mask[0], 1, layout)
        assert (found[row] - expected).abs().max() <= RELAY_BUDGET


def test_beams_of_one_request_see_the_same_context() -> None:
    context = place(blocks_of([12, 5]))
    query = random(3, HEADS, 1, SIZE, seed=7)
    tail_key, tail_value = (
        random(3, KV_HEADS, 2, SIZE, seed=8),
        random(3, KV_HEADS, 2, SIZE, seed=9),
    )
    plan = RelayPlan([context], [LAYOUT], torch.get_default_device())
    found = plan.attend(0, query, tail_key, tail_value, 0.25, None)
    for beam in range(3):
        tail = tail_key[beam], tail_value[beam]
        expected = by_moving_the_keys(query[beam], context, tail, None, 0, LAYOUT)
        assert (found[beam] - expected).abs().max() <= RELAY_BUDGET


def test_the_stored_tensors_are_bit_identical_afterwards() -> None:
    blocks = blocks_of([12, 5])
    before = [tensor.clone() for kv in blocks for tensor in (*kv.keys, *kv.values)]
    plan = RelayPlan([place(blocks)], [LAYOUT, LAYOUT], torch.get_default_device())
    states = random(1, KV_HEADS, 3, SIZE)
    for layer in (0, 1):
        plan.attend(layer, random(1, HEADS, 3, SIZE), states, states, 0.25, None)
    after = [tensor for kv in blocks for tensor in (*kv.keys, *kv.values)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_query_is_turned_against_the_blocks_shift() -> None:
    # A query at position 10 and a key at local position 2 of a block placed at 5: distance 3.
    query, key = random(1, 1, SIZE), random(1, 1, SIZE, seed=1)
    at_ten = rotate(query, *LAYOUT.cos_sin(10, query.device), LAYOUT)
    at_two = rotate(key, *LAYOUT.cos_sin(2, key.device), LAYOUT)
    turned = shift_positions(at_ten, -5, LAYOUT)
    by_distance = rotate(query, *LAYOUT.cos_sin(3, query.device), LAYOUT)
    torch.testing.assert_close(turned @ at_two.mT, by_distance @ key.mT, atol=1e-5, rtol=1e-5)


def small_segments(contexts: list[Context], tokens: int) -> list[list[int]]:
    """Token counts of the blocks of each segment."""
    return [
        [block.kv.num_tokens for block in segment.blocks]
        for segment in relay_plan._segments(contexts, tokens)
    ]


def test_blocks_under_the_limit_are_joined_until_they_reach_it() -> None:
    context = place(blocks_of([3, 20, 4, 5, 2, 6, 1]))
    assert small_segments([context], 10) == [[20], [3, 4, 5], [2, 6, 1]]
    assert small_segments([context], 1) == [[n] for n in (3, 20, 4, 5, 2, 6, 1)]


def test_only_blocks_that_all_readers_see_alike_are_joined() -> None:
    a, b, c = blocks_of([3, 4, 5])
    shared, same_start = place([a, b, c]), place([a, b])
    assert small_segments([shared, same_start], 100) == [[3, 4], [5]]
    other_order = place([b, a])
    assert small_segments([shared, other_order], 100) == [[3], [4], [5]]


@pytest.mark.parametrize("tokens", [1, 6])
def test_joined_blocks_give_what_single_ones_give(tokens: int) -> None:
    """Joined keys are rotated in float32 and rounded once more, as on the copy path."""
    blocks = blocks_of([9, 9, 1, 30, 2])
    contexts = [place([blocks[i] for i in order]) for order in ([0, 1, 2, 3], [0, 1, 4, 2])]
    query = random(2, HEADS, tokens, SIZE, seed=7)
    tail = random(2, KV_HEADS, tokens, SIZE, seed=8), random(2, KV_HEADS, tokens, SIZE, seed=9)
    found = []
    for limit in (0, 25):
        device = torch.get_default_device()
        layouts = [LAYOUT, NO_ROTATION]
        plan = RelayPlan(contexts, layouts, device, prefill_tokens=limit, decode_tokens=limit)
        found.append([plan.attend(layer, query, *tail, 0.25, None) for layer in (0, 1)])
    for single, joined in zip(*found, strict=True):
        assert (single - joined).abs().max() <= RELAY_BUDGET
        assert not torch.equal(single, joined)


def test_an_answer_joins_small_blocks_and_a_prompt_does_not() -> None:
    context = place(blocks_of([40, 40]))
    prefill, decode = relay_plan._tokens_to_join(torch.device("cpu"))
    plan = RelayPlan(
        [context], [LAYOUT], torch.get_default_device(),
        prefill_tokens=prefill, decode_tokens=decode,
    )  # fmt: skip
    tail = random(1, KV_HEADS, 3, SIZE, seed=8)
    plan.attend(0, random(1, HEADS, 3, SIZE), tail, tail, 0.25, None)
    assert "_decode" not in vars(plan)
    plan.attend(0, random(1, HEADS, 1, SIZE), tail, tail, 0.25, None)
    assert [len(segment.blocks) for segment in plan._prefill._segments] == [1, 1]
    assert [len(segment.blocks) for segment in plan._decode._segments] == [2]


def test_an_accelerator_joins_blocks_once_for_prompt_and_answer() -> None:
    prefill, decode = relay_plan._tokens_to_join(torch.device("cuda"))
    assert prefill == decode > 1000
    plan = RelayPlan(
        [place(blocks_of([40, 40]))], [LAYOUT], torch.get_default_device(),
        prefill_tokens=prefill, decode_tokens=decode,
    )  # fmt: skip
    assert plan._prefill is plan._decode
    assert [len(segment.blocks) for segment in plan._prefill._segments] == [2]


@pytest.mark.parametrize("layout", [LAYOUT, *OTHER_LAYOUTS.values()], ids=["half", *OTHER_LAYOUTS])
@pytest.mark.parametrize("joined", [0, 50], ids=["one by one", "joined"])
def test_a_token_of_an_answer_attends_to_all_blocks_at_once(
    layout: RotaryLayout, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = place(blocks_of([40, 1, 17, 60]))
    plan = RelayPlan([context], [layout], torch.get_default_device(), decode_tokens=joined)
    query = random(1, HEADS, 1, SIZE, seed=7)
    tail = random(1, KV_HEADS, 5, SIZE, seed=8), random(1, KV_HEADS, 5, SIZE, seed=9)
    spy = Mock(wraps=attend_jointly)
    monkeypatch.setattr(relay_plan, "attend_jointly", spy)
    found = plan.attend(0, query, *tail, 0.25, None)
    assert spy.call_count == (query.device.type == "cpu")
    ours = tail[0][0], tail[1][0]
    expected = by_moving_the_keys(query[0], context, ours, None, 0, layout)
    assert (found[0] - expected).abs().max() <= RELAY_BUDGET
    everywhere = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    masked = plan.attend(0, query, *tail, 0.25, everywhere)
    assert spy.call_count == (query.device.type == "cpu")
    assert (masked - found).abs().max() <= RELAY_BUDGET


@pytest.mark.parametrize("layout", [LAYOUT, *OTHER_LAYOUTS.values()], ids=["half", *OTHER_LAYOUTS])
@pytest.mark.parametrize("spread", [1.0, 1e3])
@pytest.mark.parametrize("blind", [False, True], ids=["causal", "a row sees nothing of the tail"])
def test_a_question_goes_from_block_to_block_without_merging(
    blind: bool, spread: float, layout: RotaryLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = place(blocks_of([40, 1, 17, 60]))
    plan = RelayPlan([context], [layout], torch.get_default_device())
    query = random(1, HEADS, 6, SIZE, seed=7) * spread
    tail = random(1, KV_HEADS, 6, SIZE, seed=8), random(1, KV_HEADS, 6, SIZE, seed=9)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(-1 if blind else 0)
    merged = Mock(wraps=merge)
    monkeypatch.setattr(relay_plan, "merge", merged)
    found = plan.attend(0, query, *tail, 0.25, mask)
    assert merged.called == (query.device.type != "cpu")
    ours = tail[0][0], tail[1][0]
    expected = by_moving_the_keys(query[0], context, ours, mask[0], 0, layout)
    assert (found[0] - expected).abs().max() <= RELAY_BUDGET * spread
    merged.reset_mock()
    for limit in ("MOST_ROWS", "MOST_SCORES"):
        with monkeypatch.context() as patch:
            patch.setattr(relay_plan, limit, 17)
            merging = plan.attend(0, query, *tail, 0.25, mask)
        assert (merging - found).abs().max() <= RELAY_BUDGET * spread
    assert merged.call_count == 2


def test_a_prompt_without_context_attends_to_itself() -> None:
    plan = RelayPlan([place([])], [LAYOUT], torch.get_default_device())
    for tokens in (1, 3):
        query = random(1, HEADS, tokens, SIZE, seed=7)
        tail = random(1, KV_HEADS, 3, SIZE, seed=8), random(1, KV_HEADS, 3, SIZE, seed=9)
        found = plan.attend(0, query, *tail, 0.25, None)
        key, value = (states.repeat_interleave(HEADS // KV_HEADS, 1) for states in tail)
        expected = exact(query, key, value, 0.25, None).output
        assert (found - expected).abs().max() <= RELAY_BUDGET


def test_a_batch_beams_repeated_blocks_and_other_types_are_merged_from_parts() -> None:
    device = torch.get_default_device()
    blocks = blocks_of([4, 3])
    one = RelayPlan([place(blocks)], [LAYOUT], device)
    repeated = RelayPlan([place([*blocks, blocks[0]])], [LAYOUT], device)
    batch = RelayPlan([place(blocks)] * 2, [LAYOUT], device)
    value = torch.empty(1, device=device)

    def query(rows: int, tokens: int) -> Tensor:
        return torch.empty(rows, HEADS, tokens, SIZE, device=device)

    if device.type == "cpu":
        assert one._reading_alone(query(1, 1), value) is one._decode
        assert one._reading_alone(query(1, 2), value) is one._prefill
    for tokens in (1, 2):
        assert one._reading_alone(query(2, tokens), value) is None  # two beams
        assert one._reading_alone(query(1, tokens).bfloat16(), value.bfloat16()) is None
        with torch.enable_grad():
            assert one._reading_alone(query(1, tokens), value) is None
        assert repeated._reading_alone(query(1, tokens), value) is None
        assert batch._reading_alone(query(2, tokens), value) is None
        with torch.autocast(device.type):
            assert one._reading_alone(query(1, tokens), value) is None
