"""Rotary position embeddings: how one layer rotates its keys, and moving keys to other positions.

RoPE turns each pair of a key's dimensions by ``position * frequency``, so a key that was computed
at position ``i`` is the key of position ``o + i`` after one more turn by ``o * frequency``
(Block-Attention, equation 3). cos and sin are those of unit length: a scaling factor that a model
puts on its keys (YaRN) is in them already and must not come twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True, slots=True, eq=False)
class RotaryLayout:
    """Which dimensions of a layer's keys rotate, in which pairs, at which frequencies.

    Args:
        frequencies: ``[rotary_dim / 2]`` radians per position, float32. Empty for a layer whose
            keys hold no position (NoPE). The first ``rotary_dim`` dimensions of a head rotate.
        pairing: ``"half"`` pairs dimension ``i`` with ``i + rotary_dim / 2`` (Llama, GPT-NeoX);
            ``"interleaved"`` pairs ``2i`` with ``2i + 1`` (GLM, Cohere).
    """

    frequencies: Tensor
    pairing: Pairing

    @property
    def rotary_dim(self) -> int:
        return 2 * self.frequencies.shape[0]

    @property
    def rotates(self) -> bool:
        return self.rotary_dim > 0

    def same_as(self, other: RotaryLayout) -> bool:
        return self.pairing == other.pairing and torch.equal(self.frequencies, other.frequencies)

    def cos_sin(self, offsets: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """What :func:`rotate` takes: for each rotary dimension the cosine of
        ``offset * frequency``, and the sine with the sign of the dimension's partner.

        Float32 ``[1, rotary_dim]`` for one offset, ``[tokens, rotary_dim]`` for one per token. The
        angle is formed in float64: in float32 the product loses 2e-3 rad at offset 32768.
        """
        column = torch.as_tensor(offsets, dtype=torch.float64, device="cpu").reshape(-1, 1)
        angle = column * self.frequencies.to("cpu", torch.float64)
        cos, sin = angle.cos(), angle.sin()
        cos, sin = _join(cos, cos, self.pairing), _join(-sin, sin, self.pairing)
        return cos.to(device, torch.float32), sin.to(device, torch.float32)


NO_ROTATION = RotaryLayout(torch.empty(0), "half")

Angles = dict[RotaryLayout, tuple[Tensor, Tensor]]
"""cos and sin of each layout, for :func:`rotate`: there are one or two layouts in a model."""


def shift_positions(states: Tensor, offset: int, layout: RotaryLayout) -> Tensor:
    """Rotated keys (or queries) moved by ``offset`` positions.

    Args:
        states: ``[..., tokens, head_dim]``, any float dtype, rotated for some positions ``p``.
        offset: positions to add; may be negative.
        layout: how these states were rotated.

    Returns:
        Same shape and dtype, as if encoded at ``p + offset``. The rotation is done in float32.
        Where nothing rotates or ``offset`` is 0 this is ``states`` itself.
    """
    if offset == 0 or not layout.rotates:
        return states
    return rotate(states, *layout.cos_sin(offset, states.device), layout)


def rotate(states: Tensor, cos: Tensor, sin: Tensor, layout: RotaryLayout) -> Tensor:
    """Rotate the pairs of dimensions of ``[..., tokens, head_dim]`` by the angle of cos and sin.

    ``cos`` and ``sin`` are as from ``cos_sin``, ``[1 or tokens, rotary_dim]``, or anything that
    broadcasts with the states.
    """
    rotary = states[..., : layout.rotary_dim].float()
    rotated = (rotary * cos).addcmul_(_partners(rotary, layout.pairing), sin).to(states.dtype)
    if layout.rotary_dim == states.shape[-1]:
        return rotated
    rest = states[..., layout.rotary_dim :]
    return torch.cat([rotated, rest.expand(*rotated.shape[:-1], -1)], dim=-1)


def _partners(states: Tensor, pairing: Pairing) -> Tensor:
    """Each dimension's partner in its place."""
    if pairing == "half":
        return states.roll(states.shape[-1] // 2, dims=-1)
    return states.reshape(*states.shape[:-1], states.shape[-1] // 2, 2).flip(-1).flatten(-2)


def _join(first: Tensor, second: Tensor, pairing: Pairing) -> Tensor:
    if pairing == "half":
        return torch.cat([first, second], dim=-1)
    return torch.stack([first, second], dim=-1).flatten(-2)


class LayoutFit(NamedTuple):
    """The best layout for one layer's keys, and its error: the largest deviation of the shifted
    keys from the keys seen at the later position, relative to the largest key."""

    layout: RotaryLayout
    error: float


def fit_layout(
    at_zero: Tensor, shifted: Sequence[tuple[int, Tensor]], candidates: Iterable[Tensor]
) -> LayoutFit:
    """Find how a layer rotates its keys from keys that were seen at several positions.

    Args:
        at_zero: ``[heads, tokens, head_dim]``, keys of a probe at positions 0..tokens-1.
        shifted: pairs (offset, keys of the same probe at positions offset..).
        candidates: frequency vectors that the model may use.

    Returns:
        The layout with the smallest error over all offsets, "no rotation" among them.
    """
    layouts = [NO_ROTATION]
    for frequencies in candidates:
        if 0 < 2 * frequencies.numel() <= at_zero.shape[-1]:
            layouts += [RotaryLayout(frequencies.float().cpu(), p) for p in get_args(Pairing)]
    fits = [LayoutFit(layout, _misfit(at_zero, shifted, layout)) for layout in layouts]
    return min(fits, key=lambda fit: fit.error)


def _misfit(at_zero: Tensor, shifted: Sequence[tuple[int, Tensor]], layout: RotaryLayout) -> float:
    return max(
        relative_error(shift_positions(at_zero.float(), offset, layout), keys.float())
        for offset, keys in shifted
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value."""
    scale = expected.abs().max().clamp_min(1e-30)
    return float((found - expected).abs().max() / scale)
