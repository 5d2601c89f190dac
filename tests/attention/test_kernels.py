"""Attention kernels compared with reference attention in float64 and with hand-computed numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from blockattn_rag.attention.kernels import (
    Kernel,
    attend,
    attend_causal,
    attend_flash,
    attend_fused,
    attend_memory_efficient,
    attend_plain,
    cuda_kernel_for,
    kernel_for,
    single_softmax,
)
from blockattn_rag.attention.merge import Partial, merge

KV_HEADS, SIZE = 2, 16
HALF = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALF]
pytestmark = pytest.mark.usefixtures("device", "no_gradients")

# Kernels and their supported dtypes. Without a GPU, stand-ins replace the CUDA kernels.
MASKING: dict[Kernel, list[torch.dtype]] = {
    attend: DTYPES,
    attend_plain: DTYPES,
    attend_memory_efficient: DTYPES,
}
KERNELS = MASKING | {attend_flash: HALF}


def kernels(of: dict[Kernel, list[torch.dtype]]) -> list[Any]:
    """Test parameters: each kernel with each of its dtypes."""
    return [
        pytest.param(kernel, dtype, id=f"{getattr(kernel, '__name__', kernel)}-{dtype}")
        for kernel, dtypes in of.items()
        for dtype in dtypes
    ]


def exact(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Partial:
    """Textbook softmax attention in float64."""
    scores = query.double() @ key.double().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return Partial(scores.softmax(-1) @ value.double(), scores.logsumexp(-1))


def budget(dtype: torch.dtype, keys: int) -> float:
    """Allowed error of the output for inputs of order 1. Scores are sums of SIZE products, so each
    is off by about ``SIZE * eps``, and a weight by as much; the output is a mean of values of order
    1 plus a sum over ``keys`` roundings that grow with their square root. 16-bit types also round
    the output once."""
    return (4 * SIZE + math.sqrt(keys)) * torch.finfo(dtype).eps


def bounds(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[float, float]:
    """Maximum errors of output and log-sum-exp for inputs that are exact in their dtype. A score is
    a sum of D products in float32, whose magnitudes add up to at most the product of the rows'
    norms. The relative error of a weight is twice the error of a score; weights and output are
    rounded to the inputs' dtype. Sums over keys are rounded once per key."""
    eps, of_dtype = torch.finfo(torch.float32).eps, torch.finfo(query.dtype).eps
    norms = float(query.float().norm(dim=-1).max() * key.float().norm(dim=-1).max())
    of_score = query.shape[-1] * eps * scale * norms
    of_sums = (key.shape[-2] + 8) * eps  # 8: the exponential and the division
    largest = float(value.float().abs().max())
    return largest * (2 * of_score + of_sums + of_dtype), of_score + 8 * of_sums


def assert_exact(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> None:
    """Compare a kernel with ``exact``, within ``bounds``."""
    scale = query.shape[-1] ** -0.5
    found = kernel(query, key, value, scale, mask)
    expected = exact(query, key, value, scale, mask)
    assert found.output.shape == expected.output.shape
    assert found.lse.shape == expected.lse.shape
    assert found.output.dtype == found.lse.dtype == torch.float32
    of_output, of_lse = bounds(query, key, value, scale)
    assert (found.output - expected.output).abs().max() <= of_output
    assert (found.lse - expected.lse).abs().max() <= of_lse


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random tensor with the same values on every device."""
    drawn = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(("kernel", "dtype"), kernels(KERNELS))
def test_two_keys_give_hand_computed_numbers(kernel: Kernel, dtype: torch.dtype) -> None:
    # Scores 0 and ln 3: weights 1/4 and 3/4, log-sum-exp ln 4.
    rest = [0.0] * 6  # fused kernels need a head size that is a multiple of 8
    query = torch.tensor([[[[1.0, 0.0, *rest]]]], dtype=dtype)
    key = torch.tensor([[[[0.0, 0.0, *rest], [math.log(3), 5.0, *rest]]]], dtype=dtype)
    value = torch.tensor([[[[4.0, 0.0, *rest], [0.0, 8.0, *rest]]]], dtype=dtype)
    part = kernel(query, key, value, 1.0, None)
    expected = torch.tensor([[[[1.0, 6.0, *rest]]]]), torch.tensor([[[math.log(4)]]])
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close((*part,), expected, atol=tolerance, rtol=0)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(("kernel", "dtype"), kernels(KERNELS))
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_kernels_stay_within_rounding(kernel: Kernel, dtype: torch.dtype, size: int) -> None:
    for group, tokens, keys in itertools.product((1, 2, 4, 8), (1, 5), (1, 7, 64, 300)):
        query = random(1, KV_HEADS, group * tokens, size, dtype=dtype)
        key = random(1, KV_HEADS, keys, size, seed=1, dtype=dtype)
        value = random(1, KV_HEADS, keys, size, seed=2, dtype=dtype)
        assert_exact(kernel, query, key, value)
    # These scores overflow `exp` unless the maximum is subtracted.
    assert_exact(kernel, 1000 * query, key, value)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_the_last_tokens_attend_to_all_earlier_tokens(dtype: torch.dtype, tokens: int) -> None:
    for group, size in itertools.product((1, 3, 4), (64, 80)):
        query = random(2, group * KV_HEADS, tokens, size, dtype=dtype)
        key = random(2, KV_HEADS, 300, size, seed=1, dtype=dtype)
        value = random(2, KV_HEADS, 300, size, seed=2, dtype=dtype)
        seen = torch.ones(tokens, 300, dtype=torch.bool).tril(300 - tokens)
        keys, values = (one.repeat_interleave(group, 1) for one in (key, value))
        expected = exact(query, keys, values, size**-0.5, seen).output
        of_output, _ = bounds(query, key, value, size**-0.5)
        found = attend_causal(query, key, value, size**-0.5)
        assert (found - expected).abs().max() <= of_output


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(("kernel", "dtype"), kernels(MASKING))
@pytest.mark.parametrize("rows", [1, 9, 33])
def test_masked_keys_are_ignored(kernel: Kernel, dtype: torch.dtype, rows: int) -> None:
    query = random(2, KV_HEADS, rows, SIZE, dtype=dtype)
    key = random(2, KV_HEADS, 40, SIZE, seed=1, dtype=dtype)
    value = random(2, KV_HEADS, 40, SIZE, seed=2, dtype=dtype)
    mask = torch.ones(2, 1, rows, 40, dtype=torch.bool).tril(40 - rows)
    mask[1, :, :, :3] = False  # padding
    assert_exact(kernel, query, key, value, mask)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(("kernel", "dtype"), kernels(MASKING))
def test_query_without_keys_is_zero(kernel: Kernel, dtype: torch.dtype) -> None:
    mask = torch.tensor([[True, True], [False, False]])[None, None]
    states = random(1, 1, 2, SIZE, dtype=dtype)
    part = kernel(states, states, states, 1.0, mask)
    assert part.lse[0, 0, 1] == -math.inf
    assert not part.output[0, 0, 1].any()
    assert part.output[0, 0, 0].any()


def test_values_with_another_head_size_than_keys_use_the_plain_kernel() -> None:
    query, key, value = random(1, 1, 3, 8), random(1, 1, 5, 8, seed=1), random(1, 1, 5, 4, seed=2)
    found = attend(query, key, value, 1.0)
    assert found.output.shape == (1, 1, 3, 4)
    torch.testing.assert_close(found, attend_plain(query, key, value, 1.0, None))


def test_merging_with_empty_parts_changes_nothing_and_stays_finite() -> None:
    outputs, lses = random(3, 2, 4), torch.tensor([[1.0, -math.inf]] * 3)
    lses[1:] = -math.inf
    merged = merge([Partial(*part) for part in zip(outputs, lses, strict=True)])
    torch.testing.assert_close(merged.output[0], outputs[0, 0])
    assert merged.output.isfinite().all()
    assert merged.lse.tolist() == [1.0, -math.inf]


@pytest.mark.parametrize("spread", [1.0, 1e3])
def test_one_softmax_over_several_key_sets_equals_attention_over_all_keys(spread: float) -> None:
    # Each set of keys has its own version of the query. Here the versions differ by a factor, which
    # the reference applies to the keys. A spread of 1000 gives scores that overflow exp.
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


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(("kernel", "dtype"), kernels(KERNELS))
def test_states_may_have_any_memory_layout(kernel: Kernel, dtype: torch.dtype) -> None:
    apart = random(1, KV_HEADS, SIZE, 3, dtype=dtype).mT
    odd = random(KV_HEADS * 41 * (SIZE + 1), seed=1, dtype=dtype)[1:]  # unaligned rows
    steps = (1, 40 * (SIZE + 1), SIZE + 1, 1)
    key = odd.as_strided((1, KV_HEADS, 40, SIZE), steps, storage_offset=1)
    value = random(1, KV_HEADS, 40, 2 * SIZE, seed=2, dtype=dtype)[..., ::2]
    one = random(1, KV_HEADS, 1, SIZE, dtype=dtype)
    # Strides of dimensions of length 1 are arbitrary.
    lone = one.as_strided(one.shape, (7, SIZE, 3, 1))
    for query in (apart, lone):
        assert_exact(kernel, query, key, value)


@pytest.mark.parametrize("height", [-200.0, -20.0, 0.0, 20.0, 200.0])
def test_parts_with_very_different_scores_merge_exactly(height: float) -> None:
    # One dimension adds `height` to the scores of the second part.
    query = random(1, KV_HEADS, 4, SIZE)
    query[..., 0] = 1.0
    keys = [random(1, KV_HEADS, n, SIZE, seed=n) for n in (30, 9, 1)]
    values = [random(1, KV_HEADS, n, SIZE, seed=50 + n) for n in (30, 9, 1)]
    keys[1][..., 0] = height / 0.25
    parts = [attend(query, key, value, 0.25) for key, value in zip(keys, values, strict=True)]
    expected = exact(query, torch.cat(keys, 2), torch.cat(values, 2), 0.25, None)
    for found, of_all in zip(merge(parts), expected, strict=True):
        assert (found - of_all).abs().max() <= budget(torch.float32, 40) * max(1.0, abs(height))


def test_attention_without_keys_is_zero() -> None:
    query, empty = random(1, KV_HEADS, 3, SIZE), random(1, KV_HEADS, 0, SIZE)
    found = attend(query, empty, empty, 0.25)
    assert not found.output.any()
    assert (found.lse == -math.inf).all()


def states(*shape: int, dtype: torch.dtype = torch.float32, device: str | None = None) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device).expand(*shape)  # allocates one element


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_kernel_is_used_for_every_supported_dtype(dtype: torch.dtype) -> None:
    query = states(1, 3, 150, SIZE, dtype=dtype, device="cpu")
    key = states(1, 3, 512, SIZE, dtype=dtype, device="cpu")
    assert kernel_for(query, key, key) is attend_fused
    assert kernel_for(query, key, key, torch.empty(1)) is attend_fused


def test_the_plain_kernel_is_used_where_fused_kernels_cannot_run() -> None:
    query, key = states(1, 2, 20, SIZE), states(1, 2, 600, SIZE)
    assert kernel_for(query, key, states(1, 2, 600, 8)) is attend_plain
    assert kernel_for(query, key[:, :, :0], key[:, :, :0]) is attend_plain
    assert kernel_for(query.double(), key.double(), key.double()) is attend_plain
    with torch.enable_grad():
        assert kernel_for(query, key, key) is attend_plain
    query, key = (one.to("meta") for one in (query, key))
    assert kernel_for(query, key, key) is attend_plain


@pytest.mark.parametrize(
    ("dtype", "size", "masked", "capability", "kernel"),
    [
        (torch.bfloat16, 64, False, (9, 0), attend_flash),
        (torch.float16, 256, False, (8, 0), attend_flash),
        (torch.bfloat16, 264, False, (9, 0), attend_memory_efficient),
        (torch.bfloat16, 64, True, (9, 0), attend_memory_efficient),
        (torch.float32, 64, False, (9, 0), attend_memory_efficient),
        (torch.float32, 6, False, (9, 0), attend_plain),
        (torch.bfloat16, 36, False, (9, 0), attend_plain),
        (torch.float16, 64, False, (7, 5), attend_plain),
    ],
)
def test_the_cuda_kernel_depends_on_dtype_head_size_mask_and_gpu(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    size: int,
    masked: bool,
    capability: tuple[int, int],
    kernel: Kernel,
) -> None:
    mask = torch.empty(1) if masked else None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        query = torch.empty(1, 2, 3, size, dtype=dtype, device="cuda")
        assert cuda_kernel_for(query, mask) is kernel


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [80, 256, 264])
def test_pytorchs_kernels_for_cuda_return_the_shapes_that_merge_takes(
    monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype, masked: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with FakeTensorMode():
        query = torch.empty(2, KV_HEADS, 33, size, dtype=dtype, device="cuda")
        key = torch.empty(2, KV_HEADS, 300, size, dtype=dtype, device="cuda")
        mask = torch.ones(2, 1, 33, 300, dtype=torch.bool, device="cuda") if masked else None
        found = attend(query, key, key, 0.25, mask)
    assert found.output.shape == (2, KV_HEADS, 33, size)
    assert found.lse.shape == (2, KV_HEADS, 33)
    assert found.output.dtype == found.lse.dtype == torch.float32
    assert found.output.device.type == found.lse.device.type == "cuda"
