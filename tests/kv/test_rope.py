"""Moving rotated keys is exact for every pairing, width, offset and dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockattn_rag.kv.rope import (
    NO_ROTATION,
    Pairing,
    RotaryLayout,
    fit_layout,
    relative_error,
    rotate_into,
    shift_positions,
)

HEAD_DIM, TOKENS = 16, 6
FLOAT32_EPS, BFLOAT16_EPS = 2.0**-24, 2.0**-8  # unit roundoff


def frequencies(rotary_dim: int = HEAD_DIM) -> Tensor:
    return 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)


LAYOUTS = {
    "half": RotaryLayout(frequencies(), "half"),
    "interleaved": RotaryLayout(frequencies(), "interleaved"),
    "half, partial": RotaryLayout(frequencies(6), "half"),
    "interleaved, partial": RotaryLayout(frequencies(6), "interleaved"),
    "none": NO_ROTATION,
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def unrotated() -> Tensor:
    return torch.randn(2, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(0))


def encoded_at(start: int, layout: RotaryLayout) -> Tensor:
    """Keys at positions from ``start``, by the definition of RoPE with complex float64 numbers."""
    states = unrotated().double()
    dim = layout.rotary_dim
    rotating, rest = states[..., :dim], states[..., dim:]
    if layout.pairing == "half":
        first, second = rotating.chunk(2, dim=-1)
    else:
        first, second = rotating[..., 0::2], rotating[..., 1::2]
    positions = torch.arange(start, start + TOKENS, dtype=torch.float64)
    turn = torch.polar(torch.ones(1).double(), positions[:, None] * layout.frequencies.double())
    turned = torch.complex(first, second) * turn
    pair = (turned.real, turned.imag)
    joined = torch.cat(pair, -1) if layout.pairing == "half" else torch.stack(pair, -1).flatten(-2)
    return torch.cat([joined, rest], dim=-1)


@layouts
def test_a_shift_of_zero_is_the_identity(layout: RotaryLayout) -> None:
    states = encoded_at(0, layout).float()
    assert shift_positions(states, 0, layout) is states


@layouts
@pytest.mark.parametrize("offset", [1, 17, 1000, 32_768, 1_000_000, -5])
def test_a_shift_equals_encoding_at_that_position(layout: RotaryLayout, offset: int) -> None:
    found = shift_positions(encoded_at(0, layout).float(), offset, layout)
    # Each result is x*cos - y*sin in float32. The two inputs, cos, sin, the products and the
    # difference are rounded once each: 7 roundings of at most the norm of the pair, which is at
    # most sqrt(2) times the largest key. The float64 angle adds 1e6 * 1e-16, for any offset.
    budget = 7 * 2**0.5 * FLOAT32_EPS
    assert relative_error(found.double(), encoded_at(offset, layout)) <= budget < 1e-5


@layouts
def test_bfloat16_keys_are_rounded_once(layout: RotaryLayout) -> None:
    stored = encoded_at(0, layout).bfloat16()
    found = shift_positions(stored, 777, layout)
    exact = shift_positions(stored.float(), 777, layout)
    assert found.dtype == torch.bfloat16
    # The rotation in float32, plus one rounding to bfloat16.
    assert relative_error(found.float(), exact) <= BFLOAT16_EPS + 7 * 2**0.5 * FLOAT32_EPS


def test_inputs_are_not_modified() -> None:
    states = unrotated()
    before = states.clone()
    shift_positions(states, 9, LAYOUTS["half"])
    assert torch.equal(states, before)


@layouts
def test_a_layout_is_detected_from_keys(layout: RotaryLayout) -> None:
    shifted = [(offset, encoded_at(offset, layout).float()) for offset in (13, 1009)]
    candidates = [frequencies(6), frequencies(), frequencies() / 4, frequencies(32)]
    fit = fit_layout(encoded_at(0, layout).float(), shifted, candidates)
    assert fit.error <= 1e-5
    if layout.rotates:
        assert fit.layout.same_as(layout)
    else:
        assert not fit.layout.rotates


def test_no_layout_is_detected_for_keys_without_rotation() -> None:
    shifted = [(13, unrotated() + 1)]
    assert fit_layout(unrotated(), shifted, [frequencies()]).error > 0.1


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_offsets_may_differ_by_token(pairing: Pairing) -> None:
    from blockattn_rag.kv.rope import rotate

    layout = RotaryLayout(frequencies(), pairing)
    states = encoded_at(0, layout).float()
    offsets = torch.tensor([0, 0, 5, 5, 5, 40_000])
    found = rotate(states, *layout.cos_sin(offsets, states.device), layout)
    for index, offset in enumerate(offsets.tolist()):
        expected = shift_positions(states, offset, layout)
        assert torch.equal(found[:, index], expected[:, index])


@layouts
def test_shifting_zero_tokens_is_allowed(layout: RotaryLayout) -> None:
    assert shift_positions(unrotated()[:, :0], 5, layout).shape == unrotated()[:, :0].shape


@pytest.mark.usefixtures("device")
def test_gradients_flow_through_rotated_keys() -> None:
    layout = LAYOUTS["half"]
    keys = torch.ones(2, TOKENS, HEAD_DIM, requires_grad=True)
    out = torch.empty(2, TOKENS, HEAD_DIM)
    rotate_into(out, keys, *layout.cos_sin(torch.arange(TOKENS), out.device), layout)
    (gradient,) = torch.autograd.grad(out.sum(), keys)
    assert gradient.abs().sum() > 0
