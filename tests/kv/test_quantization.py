"""Int8 keys and values: the error is at most half a quantization step, for any values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.quantization import KVScales
from tests.kv.test_block_kv import block
from tests.store.kvs import FLOATS

# Half a step, plus the float32 rounding of the scale, the quotient and the product, each at most
# 127 steps times 2**-24.
HALF_A_STEP = 0.5 + 3 * 127 * 2**-24


def kv_of(keys: Tensor, values: Tensor) -> BlockKV:
    ids = torch.arange(keys.shape[1])
    return BlockKV((keys,), (values,), ids, "fingerprint", "digest", "handle")


def budget(states: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the allowed error of dequantized states: quantization and one rounding."""
    info = torch.finfo(dtype)
    largest = states.double().abs() + scale.double()
    rounding = largest * info.eps / 2 + info.smallest_normal * info.eps
    to_float32 = largest * 2**-24 if dtype == torch.float64 else 0.0
    return HALF_A_STEP * scale.double() + rounding + to_float32


def scales_of(kv: BlockKV) -> KVScales:
    assert kv.scales is not None
    return kv.scales


def check(kv: BlockKV) -> BlockKV:
    """Quantize a block of one layer, and check that the errors are within the budget."""
    made, scales = kv.quantized(), scales_of(kv.quantized())
    pairs = zip(kv.states(0), made.states(0), (scales.keys[0], scales.values[0]), strict=True)
    for states, back, scale in pairs:
        assert back.dtype == states.dtype
        error = (back.double() - states.double()).abs()
        assert bool((error <= budget(states, scale, states.dtype)).all())
    return made


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_errors_are_at_most_half_a_step(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, 50, 16, generator=generator) * 2.0 ** torch.arange(-8, 8)
    values = torch.randn(2, 50, 12, generator=generator) * 2.0 ** torch.arange(-5, 5, 0.2)[:, None]
    made = check(kv_of(keys.to(dtype), values.to(dtype)))
    scales = scales_of(made)
    assert {t.dtype for t in (*made.keys, *made.values)} == {torch.int8}
    assert (scales.keys[0].shape, scales.values[0].shape) == ((2, 1, 16), (2, 50, 1))
    assert scales.keys[0].dtype == scales.values[0].dtype == torch.float32
    assert scales.dtype == dtype
    # The scale maps the largest magnitude to 127.
    assert torch.equal(made.keys[0].abs().amax(1), torch.full((2, 16), 127, dtype=torch.int8))
    assert torch.equal(made.values[0].abs().amax(2), torch.full((2, 50), 127, dtype=torch.int8))


_MAGNITUDES = st.floats(-45, 38, allow_nan=False)  # starts at subnormal float32 values


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(1, 4),
    st.lists(_MAGNITUDES | st.just(-math.inf), min_size=6, max_size=6),
    st.integers(0, 99),
)
def test_errors_of_extreme_values_are_within_the_budget(
    dtype: torch.dtype, tokens: int, exponents: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(2, tokens, 6, generator=generator, dtype=torch.float64) * 2 - 1
    states = (unit * 10.0 ** torch.tensor(exponents, dtype=torch.float64)).to(dtype)
    made = check(kv_of(states, states))
    assert all(bool(t.isfinite().all()) for t in made.states(0))


def test_float16_values_stay_finite() -> None:
    states = torch.full((1, 3, 2), torch.finfo(torch.float16).max, dtype=torch.float16)
    states[:, 1] = torch.finfo(torch.float16).tiny / 512
    check(kv_of(states, -states))
    assert torch.equal(kv_of(states, -states).quantized().states(0)[0][:, 0], states[:, 0])


def test_zeros_stay_zeros() -> None:
    made = check(kv_of(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)))
    assert all(not t.any() for t in made.states(0))
    assert all(bool((t > 0).all()) for t in (*scales_of(made).keys, *scales_of(made).values))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_stay_non_finite(bad: float) -> None:
    states = torch.ones(1, 3, 4)
    states[0, 1, 2] = bad
    made = kv_of(states, states).quantized()
    keys, values = made.states(0)
    assert not scales_of(made).keys[0].isfinite().all()
    assert not keys[0, 1, 2].isfinite()
    assert not values[0, 1, 2].isfinite()
    assert keys[..., :2].isfinite().all()
    assert values[:, [0, 2]].isfinite().all()


def test_quantizing_twice_changes_nothing() -> None:
    one = block(5, 1).quantized()
    assert one.quantized() is one


def test_keys_of_several_dtypes_are_refused() -> None:
    one = block(3, 1)
    with pytest.raises(ValueError, match=r"Cannot quantize .*float16.*float32.*: expected keys"):
        replace(one, keys=tuple(t.half() for t in one.keys)).quantized()
    with pytest.raises(ValueError, match=r"quantize \['torch.int8'\]"):
        replace(one.quantized(), scales=None).quantized()


def test_sizes_of_a_quantized_block() -> None:
    one = block(3, 1)
    made = one.quantized()
    layers, heads, tokens, size = 3, 2, 3, 8
    assert made.nbytes == layers * heads * (2 * tokens * size + 4 * size + 4 * tokens)
    assert made.token_outline == one.token_outline
    assert made.key == one.key
    assert made.num_tokens == 3


def test_float32_keys_are_available_before_rounding() -> None:
    one = replace(
        block(3, 1),
        keys=tuple(t.bfloat16() for t in block(3, 1).keys),
        values=tuple(t.bfloat16() for t in block(3, 1).values),
    )
    assert all(t.dtype == torch.bfloat16 for t in one.states(0, exact_keys=True))
    made = one.quantized()
    keys, values = made.states(0, exact_keys=True)
    assert (keys.dtype, values.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(keys, made.keys[0] * scales_of(made).keys[0])
    assert torch.equal(keys.bfloat16(), made.states(0)[0])


def test_a_copy_has_its_own_scales() -> None:
    one = block(3, 1).quantized()
    copy = one.copy_to(torch.device("cpu"))
    for layer in range(one.num_layers):
        assert len(one.tensors(layer)) == 4
        for mine, theirs in zip(one.tensors(layer), copy.tensors(layer), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.dtype == theirs.dtype
            assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
    assert (copy.nbytes, copy.digest) == (one.nbytes, one.digest)
    assert scales_of(copy).dtype == torch.float32
    away = one.to(torch.device("meta"))
    assert {t.device.type for t in away.tensors(0)} == {"meta"}
