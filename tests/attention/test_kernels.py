"""Relay attention against attention written out in float64, and against hand-written numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention.kernels import (
    Partial,
    attend_plain,
    merge,
    single_softmax,
)
from blockattn_rag.attention.strategies import kernel_for

KV_HEADS, SIZE = 2, 16
pytestmark = pytest.mark.usefixtures("device", "no_gradients")


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Partial:
    """By the kernel that is fastest here."""
    return kernel_for(query, key, value, mask)(query, key, value, scale, mask)


BACKENDS = [attend_plain, attend]


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Partial:
    """Softmax attention in float64, as written in any textbook."""
    scores = query.double() @ key.double().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return Partial(scores.softmax(-1) @ value.double(), scores.logsumexp(-1))


def budget(dtype: torch.dtype, keys: int) -> float:
    """Error of an output whose inputs are of order 1.

    Scores are sums of SIZE products, so each is off by about ``SIZE * eps``, and a weight by as
    much; the output is a mean of values of order 1 plus a sum over ``keys`` roundings that grow
    with their square root. 16-bit types also round the output once.
    """
    return (4 * SIZE + math.sqrt(keys)) * torch.finfo(dtype).eps


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every device."""
    drawn = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_query_over_two_keys_gives_the_numbers_worked_out_by_hand(
    backend: Callable[..., Partial],
) -> None:
    # Scores 0 and ln 3: weights 1/4 and 3/4, log-sum-exp ln 4.
    rest = [0.0] * 6  # fused kernels want heads of 8
    query = torch.tensor([[[[1.0, 0.0, *rest]]]])
    key = torch.tensor([[[[0.0, 0.0, *rest], [math.log(3), 5.0, *rest]]]])
    value = torch.tensor([[[[4.0, 0.0, *rest], [0.0, 8.0, *rest]]]])
    part = backend(query, key, value, 1.0, None)
    torch.testing.assert_close(part.output, torch.tensor([[[[1.0, 6.0, *rest]]]]))
    torch.testing.assert_close(part.lse, torch.tensor([[[math.log(4)]]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
def test_each_backend_stays_within_the_rounding_of_its_type(
    backend: Callable[..., Partial], dtype: torch.dtype, masked: bool
) -> None:
    query = random(1, KV_HEADS, 9, SIZE, dtype=dtype)
    key = random(1, KV_HEADS, 40, SIZE, seed=1, dtype=dtype)
    value = random(1, KV_HEADS, 40, SIZE, seed=2, dtype=dtype)
    mask = torch.ones(9, 40, dtype=torch.bool).tril(30)[None, None] if masked else None
    found = backend(query, key, value, 0.25, mask)
    expected = exact(query, key, value, 0.25, mask)
    assert found.output.dtype == found.lse.dtype == torch.float32
    assert (found.output - expected.output).abs().max() <= budget(dtype, 40)
    assert (found.lse - expected.lse).abs().max() <= budget(dtype, 40)


@pytest.mark.parametrize("spread", [1.0, 1e3])
def test_large_scores_are_attended_to_exactly(spread: float) -> None:
    # A spread of 1000 puts scores far beyond what exp can take as it stands.
    query = random(1, KV_HEADS, 20, SIZE) * spread
    key, value = random(1, KV_HEADS, 600, SIZE, seed=1), random(1, KV_HEADS, 600, SIZE, seed=2)
    expected = exact(query, key, value, 0.25, None)
    found = attend(query, key, value, 0.25)
    assert (found.output - expected.output).abs().max() <= budget(torch.float32, 600) * spread
    assert (found.lse - expected.lse).abs().max() <= budget(torch.float32, 600) * spread


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_has_output_zero_and_minus_infinity(
    backend: Callable[..., Partial],
) -> None:
    mask = torch.tensor([[True, True], [False, False]])[None, None]
    states = random(1, 1, 2, SIZE)
    part = backend(states, states, states, 1.0, mask)
    assert part.lse[0, 0, 1] == -math.inf
    assert not part.output[0, 0, 1].any()
    assert part.output[0, 0, 0].any()


def test_values_of_another_size_than_keys_are_attended_to_by_the_plain_backend() -> None:
    query, key, value = random(1, 1, 3, 8), random(1, 1, 5, 8, seed=1), random(1, 1, 5, 4, seed=2)
    found = attend(query, key, value, 1.0)
    assert found.output.shape == (1, 1, 3, 4)
    torch.testing.assert_close(found, attend_plain(query, key, value, 1.0, None))


def test_parts_merge_to_attention_over_the_whole() -> None:
    query = random(1, KV_HEADS, 5, SIZE)
    key, value = random(1, KV_HEADS, 60, SIZE, seed=1), random(1, KV_HEADS, 60, SIZE, seed=2)
    whole = exact(query, key, value, 0.25, None)
    cuts = [slice(0, 1), slice(1, 30), slice(30, 60)]
    parts = [attend(query, key[:, :, cut], value[:, :, cut], 0.25) for cut in cuts]
    merged = merge(parts)
    assert (merged.output - whole.output).abs().max() <= budget(torch.float32, 60)
    assert (merged.lse - whole.lse).abs().max() <= budget(torch.float32, 60)


def test_merging_with_parts_that_see_nothing_changes_nothing_and_stays_finite() -> None:
    outputs, lses = random(3, 2, 4), torch.tensor([[1.0, -math.inf]] * 3)
    lses[1:] = -math.inf
    merged = merge([Partial(*part) for part in zip(outputs, lses, strict=True)])
    torch.testing.assert_close(merged.output[0], outputs[0, 0])
    assert merged.output.isfinite().all()
    assert merged.lse.tolist() == [1.0, -math.inf]


@pytest.mark.parametrize("spread", [1.0, 1e3])
def test_one_softmax_over_several_sets_of_keys_is_attention_over_all_of_them(spread: float) -> None:
    # Each set sees the query turned its own way: here by a factor, which exact attention puts on
    # the set's keys. A spread of 1000 puts scores far beyond what exp can take as it stands.
    lengths, factors = [30, 1, 9], [1.0, -0.5, 2.0]
    query = random(KV_HEADS, 3, SIZE) * spread
    keys = [random(KV_HEADS, n, SIZE, seed=n) for n in lengths]
    values = [random(KV_HEADS, n, SIZE, seed=50 + n) for n in lengths]
    found = single_softmax(
        [query * factor for factor in factors], [*zip(keys, values, strict=True)], 0.25
    )
    moved = torch.cat([key * factor for key, factor in zip(keys, factors, strict=True)], dim=1)
    expected = exact(query, moved, torch.cat(values, dim=1), 0.25, None).output
    assert (found - expected).abs().max() <= budget(torch.float32, 40) * spread


def test_states_whose_numbers_do_not_lie_side_by_side_are_read_right() -> None:
    query = random(1, KV_HEADS, SIZE, 3).mT
    key = random(1, KV_HEADS, SIZE, 40, seed=1).mT
    value = random(1, KV_HEADS, 40, 2 * SIZE, seed=2)[..., ::2]
    found = attend(query, key, value, 0.25)
    expected = exact(query, key, value, 0.25, None)
    assert (found.output - expected.output).abs().max() <= budget(torch.float32, 40)
    assert (found.lse - expected.lse).abs().max() <= budget(torch.float32, 40)


@pytest.mark.parametrize("height", [-200.0, -20.0, 0.0, 20.0, 200.0])
def test_parts_merge_exactly_however_far_apart_their_scores_are(height: float) -> None:
    # The scores of the second part exceed those of the first by `height`: one dimension does it.
    query = random(1, KV_HEADS, 4, SIZE)
    query[..., 0] = 1.0
    keys = [random(1, KV_HEADS, n, SIZE, seed=n) for n in (30, 9)]
    values = [random(1, KV_HEADS, n, SIZE, seed=50 + n) for n in (30, 9)]
    keys[1][..., 0] = height / 0.25
    parts = [attend(query, key, value, 0.25) for key, value in zip(keys, values, strict=True)]
    expected = exact(query, torch.cat(keys, 2), torch.cat(values, 2), 0.25, None).output
    error = (merge(parts).output - expected).abs().max()
    assert error <= budget(torch.float32, 39) * max(1.0, abs(height))


def test_no_keys_at_all_are_attended_to_by_no_one() -> None:
    query, empty = random(1, KV_HEADS, 3, SIZE), random(1, KV_HEADS, 0, SIZE)
    found = attend(query, empty, empty, 0.25)
    assert not found.output.any()
    assert (found.lse == -math.inf).all()
