"""The weight of the context against weights written out, and what texts name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention.context_merge import (
    ContextMerge,
    FixedMerge,
    LearnedMerge,
    parse_merge,
)
from blockattn_rag.attention.kernels import attend_plain, merge
from tests.attention.test_kernels import KV_HEADS, SIZE, budget, random

HEADS, TOKENS, CONTEXT, REST = 6, 5, 30, 12
SCALE = 0.25
pytestmark = pytest.mark.usefixtures("device")

FIXED = [
    FixedMerge("scale", 0.8, 0.9),
    FixedMerge("scale", 1.3),
    FixedMerge("bias", -0.7, 1.2),
    FixedMerge("ape", 0.8, 0.9),
]
PLAIN = [FixedMerge("scale", 1.0), FixedMerge("bias", 0.0), FixedMerge("ape", 1.0)]


def name_of(weight: object) -> str:
    """A test's name, the same in every process."""
    return "learned" if callable(weight) else str(weight)


def learned(layers: int = 2, heads: int = HEADS, kv_heads: int = KV_HEADS) -> LearnedMerge:
    """Far from plain attention, everywhere otherwise."""
    return LearnedMerge(
        random(layers, heads, seed=11) * 0.3,
        random(layers, heads, seed=12),
        random(layers, kv_heads, SIZE, seed=13),
    )


def states(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[2, K, Q, D]``, keys and values ``[2, K, N, D]``, the context's first."""
    rows = HEADS // KV_HEADS * TOKENS
    count = CONTEXT + REST
    query = random(2, KV_HEADS, rows, SIZE, seed=seed)
    key = random(2, KV_HEADS, count, SIZE, seed=seed + 1)
    return query, key, random(2, KV_HEADS, count, SIZE, seed=seed + 2)


def merged(
    weight: ContextMerge, query: Tensor, key: Tensor, value: Tensor, *, seen: bool = True
) -> Tensor:
    """Attention by parts; ``seen``: whether the queries see the context."""
    heated, scale = weight.heat(1, query, SCALE)
    mask = torch.full((1, 1, 1, CONTEXT), seen)
    context = attend_plain(heated, key[:, :, :CONTEXT], value[:, :, :CONTEXT], scale, mask)
    rest = attend_plain(query, key[:, :, CONTEXT:], value[:, :, CONTEXT:], SCALE)
    return weight.combine(1, context, rest)


def by_the_formula(weight: FixedMerge, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The module's formula, in sums of exponentials, float64."""
    scores = query.double() @ key.double().mT * SCALE
    hot = (scores[..., :CONTEXT] / weight.temperature).exp()
    plain = scores[..., CONTEXT:].exp()
    whole = plain.sum(-1, keepdim=True)
    heated = hot.sum(-1, keepdim=True) ** weight.temperature
    mass = {
        "scale": whole * (heated / whole) ** weight.value,
        "bias": heated * math.exp(weight.value),
        "ape": heated**weight.value,
    }[weight.form]
    weights = torch.cat([hot / hot.sum(-1, keepdim=True) * mass, plain], dim=-1)
    return weights @ value.double() / (mass + whole)


@pytest.mark.parametrize("weight", FIXED, ids=str)
def test_each_form_gives_its_formula(weight: FixedMerge) -> None:
    given = states()
    expected = by_the_formula(weight, *given)
    assert (merged(weight, *given) - expected).abs().max() <= budget(torch.float32, 42)
    plain = merged(PLAIN[0], *given)
    assert (plain - expected).abs().max() > 1e-2


def test_two_keys_give_the_numbers_worked_out_by_hand() -> None:
    # Context: a score of ln 9. Rest: a score of 0, of weight 1. Then S = 1/2 makes 9 to 3.
    query = torch.ones(1, 1, 1, 1)
    context = attend_plain(query, torch.full((1, 1, 1, 1), math.log(9)), query * 4, 1.0)
    rest = attend_plain(query, query * 0, query * 0, 1.0)
    for weight, share in [
        (FixedMerge("scale", 0.5), 3 / 4),
        (FixedMerge("ape", 0.5), 3 / 4),
        (FixedMerge("bias", -math.log(9)), 1 / 2),
    ]:
        found = weight.combine(0, context, rest)
        torch.testing.assert_close(found, torch.full((1, 1, 1, 1), 4 * share))


def test_the_learned_form_gives_each_head_its_own_weights() -> None:
    weight, (query, key, value) = learned(), states()
    found = merged(weight, query, key, value)
    groups = HEADS // KV_HEADS
    for head in range(HEADS):
        kv_head, start = head // groups, head % groups * TOKENS
        rows = slice(start, start + TOKENS)
        alone = FixedMerge(
            "bias", float(weight.bias[1, head]), float(weight.log_temperature[1, head].exp())
        )
        moved = value[:, [kv_head]].clone()
        moved[:, :, :CONTEXT] += weight.shift[1, kv_head]
        one = query[:, [kv_head], rows], key[:, [kv_head]], moved
        expected = by_the_formula(alone, *one)
        error = (found[:, [kv_head], rows] - expected).abs().max()
        assert error <= 4 * budget(torch.float32, 42)  # temperatures as low as 0.5


@pytest.mark.parametrize("weight", [*PLAIN, "learned"], ids=str)
def test_without_weights_it_is_plain_attention(weight: Any) -> None:
    if weight == "learned":
        weight = LearnedMerge.identity(2, HEADS, KV_HEADS, SIZE)
    query, key, value = states()
    whole = attend_plain(query, key, value, SCALE).output
    assert (merged(weight, query, key, value) - whole).abs().max() <= budget(torch.float32, 42)


@pytest.mark.parametrize("weight", [*FIXED, learned], ids=name_of)
def test_only_apes_form_changes_when_all_scores_grow_by_a_constant(weight: Any) -> None:
    weight = weight() if callable(weight) else weight
    query, key, value = states()
    # A further number of each key, the same for all, adds it to all scores.
    longer = torch.cat([query, torch.ones_like(query[..., :1])], dim=-1)
    found = [
        merged(weight, longer, torch.cat([key, torch.full_like(key[..., :1], more)], -1), value)
        for more in (0.0, 12.0)
    ]
    error = (found[0] - found[1]).abs().max()
    if isinstance(weight, FixedMerge) and weight.form == "ape":
        assert error > 1e-2
    else:
        assert error <= 4 * budget(torch.float32, 42)


@pytest.mark.parametrize("weight", [*FIXED, learned], ids=name_of)
def test_a_request_without_context_attends_to_the_rest_alone(weight: Any) -> None:
    weight = weight() if callable(weight) else weight
    query, key, value = states()
    rest = attend_plain(query, key[:, :, CONTEXT:], value[:, :, CONTEXT:], SCALE)
    assert torch.equal(merged(weight, query, key, value, seen=False), rest.output)
    nothing = attend_plain(query, key, value, SCALE, torch.zeros(1, 1, 1, 42, dtype=torch.bool))
    assert not weight.combine(1, nothing, nothing).any()
    context = attend_plain(query, key, value, SCALE)
    shift = weight.shift[1][:, None] if isinstance(weight, LearnedMerge) else 0.0
    torch.testing.assert_close(weight.combine(1, context, nothing), context.output + shift)


def test_gradients_reach_every_learned_number_and_are_finite_without_context() -> None:
    weight = LearnedMerge.identity(2, HEADS, KV_HEADS, SIZE)
    given = states()
    merged(weight, *given).square().sum().backward()  # type: ignore[no-untyped-call]
    for tensor in weight.parameters():
        assert tensor.grad is not None
        assert tensor.grad[1].abs().min() > 0
        assert not tensor.grad[0].any()
        tensor.grad = None
    merged(weight, *given, seen=False).square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(not tensor.grad.any() for tensor in weight.parameters() if tensor.grad is not None)


def test_gradients_are_those_of_finite_differences() -> None:
    weight = learned()
    given = [tensor[:1] for tensor in states()]
    for tensor in weight.parameters():
        tensor.requires_grad_()
    merged(weight, *given).square().sum().backward()  # type: ignore[no-untyped-call]
    step = 1e-2
    for tensor in weight.parameters():
        assert tensor.grad is not None
        at = (1, *(0 for _ in tensor.shape[1:]))
        sums = []
        with torch.no_grad():
            for more in (step, -2 * step):
                tensor[at] += more
                sums.append(float(merged(weight, *given).double().square().sum()))
        slope = (sums[0] - sums[1]) / (2 * step)
        assert float(tensor.grad[at]) == pytest.approx(slope, rel=1e-2, abs=1e-3)


def test_a_learned_merge_of_other_layers_or_heads_is_refused() -> None:
    learned().check_layer(1, HEADS, KV_HEADS)
    for found in ((2, HEADS, KV_HEADS), (0, 2 * HEADS, KV_HEADS), (0, HEADS, HEADS)):
        with pytest.raises(ValueError, match=r"found a learned merge of 2 layers.*fit one"):
            learned().check_layer(*found)


def test_a_learned_merge_serves_the_model_that_it_was_fitted_to() -> None:
    unnamed, weight = learned(), replace(learned(), fingerprint="ab" * 32)
    device = torch.get_default_device()
    assert unnamed.ready_for(lambda: "cd" * 32, device) is unnamed
    assert weight.ready_for(lambda: "ab" * 32, device) is weight
    with pytest.raises(ValueError, match=r"found a learned merge of the model abab.*cdcd.*anew"):
        weight.ready_for(lambda: "cd" * 32, device)
    assert FIXED[0].ready_for(lambda: "cd" * 32, device) is FIXED[0]
    elsewhere = weight.ready_for(lambda: "ab" * 32, torch.device("meta"))
    assert {tensor.device.type for tensor in elsewhere.parameters()} == {"meta"}


def test_texts_name_fixed_merges_and_files() -> None:
    assert parse_merge("none") is None
    assert parse_merge("scale:0.95") == FixedMerge("scale", 0.95, 1.0)
    assert parse_merge("bias:-0.5:0.9") == FixedMerge("bias", -0.5, 0.9)
    assert parse_merge("ape:1:.8") == FixedMerge("ape", 1.0, 0.8)
    assert parse_merge("a/b:c.safetensors") == Path("a/b:c.safetensors")


@pytest.mark.parametrize(
    "text",
    [
        *("", "scale", "scale:", "scale:x", "scale:1:1:1", "scales:1", "None", "calibrated"),
        *("scale:0", "scale:-1", "ape:0", "scale:1:0", "bias:0:-1", "scale:nan", "bias:inf"),
        *("bias:0:inf", None, 0.95),
    ],
)
def test_other_texts_are_refused_with_what_was_found(text: Any) -> None:
    with pytest.raises(ValueError, match=r"found merge=.*expected 'none', 'scale:S'") as refusal:
        parse_merge(text)
    assert repr(text) in str(refusal.value)


def test_merging_the_parts_of_a_heated_context_first_is_exact() -> None:
    weight, (query, key, value) = FIXED[0], states()
    heated, scale = weight.heat(0, query, SCALE)
    cuts = [slice(0, 10), slice(10, CONTEXT)]
    parts = [attend_plain(heated, key[:, :, cut], value[:, :, cut], scale) for cut in cuts]
    rest = attend_plain(query, key[:, :, CONTEXT:], value[:, :, CONTEXT:], SCALE)
    found = weight.combine(0, merge(parts), rest)
    assert (found - by_the_formula(weight, query, key, value)).abs().max() <= 1e-5
