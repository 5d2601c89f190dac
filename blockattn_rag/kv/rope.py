"""Rotary position embeddings: rotary layouts of layers, and moving keys to new positions.

RoPE rotates each pair of a key's dimensions by ``position * frequency``. Another rotation by
``o * frequency`` therefore moves a key from position ``i`` to position ``o + i`` (Block-Attention,
equation 3). cos and sin are unscaled: keys already include a model's scaling factor (YaRN), which
must not be applied twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from blockattn_rag.errors import UnsupportedModelError

Pairing = Literal["half", "interleaved"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RotaryLayout:
    """Rotary layout of a layer's keys: which dimensions rotate, their pairing and frequencies.

    Args:
        frequencies: Radians per position, ``[rotary_dim / 2]``, float32. The first ``rotary_dim``
            dimensions of a head rotate. Empty for a layer without position embeddings (NoPE).
        pairing: ``"half"`` pairs dimension ``i`` with ``i + rotary_dim / 2`` (Llama, GPT-NeoX);
            ``"interleaved"`` pairs ``2i`` with ``2i + 1`` (GLM, Cohere).
    """

    frequencies: Tensor
    pairing: Pairing

    def __post_init__(self) -> None:
        if self.pairing not in get_args(Pairing):
            raise ValueError(
                f"Unknown pairing {self.pairing!r}: expected one of {', '.join(get_args(Pairing))}"
            )

    @property
    def rotary_dim(self) -> int:
        return 2 * self.frequencies.shape[0]

    @property
    def rotates(self) -> bool:
        return self.rotary_dim > 0

    def same_as(self, other: RotaryLayout) -> bool:
        return self.pairing == other.pairing and torch.equal(self.frequencies, other.frequencies)

    def cos_sin(self, offsets: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Compute cos and sin of ``offset * frequency`` per rotary dimension, for :func:`rotate`.

        The sine includes the sign of the partner dimension. Both are float32 ``[n, rotary_dim]``,
        with one row per offset. Angles are computed in float64, because in float32, their error
        reaches 2e-3 rad at offset 32768.
        """
        column = torch.as_tensor(offsets, dtype=torch.float64, device="cpu").reshape(-1, 1)
        angle = column * self.frequencies.to("cpu", torch.float64)
        cos, sin = angle.cos(), angle.sin()
        cos, sin = _join(cos, cos, self.pairing), _join(-sin, sin, self.pairing)
        return cos.to(device, torch.float32), sin.to(device, torch.float32)


NO_ROTATION = RotaryLayout(torch.empty(0), "half")

Angles = dict[RotaryLayout, tuple[Tensor, Tensor]]
"""cos and sin for each layout, as used by :func:`rotate`. Most models have one or two layouts."""


def shift_positions(states: Tensor, offset: int, layout: RotaryLayout) -> Tensor:
    """Move rotated keys or queries ``[..., tokens, head_dim]`` by ``offset`` positions.

    Computed in float32, and returned in the dtype of ``states``. Returns ``states`` itself if
    ``offset`` is 0 or the layer does not rotate keys.
    """
    if offset == 0 or not layout.rotates:
        return states
    return rotate(states, *layout.cos_sin(offset, states.device), layout)


def rotate(states: Tensor, cos: Tensor, sin: Tensor, layout: RotaryLayout) -> Tensor:
    """Rotate the dimension pairs of states ``[..., tokens, head_dim]``.

    ``cos`` and ``sin``: Results of ``RotaryLayout.cos_sin``, reshaped if needed to broadcast with
    the states.
    """
    rotated = _rotated(states, cos, sin, layout).to(states.dtype)
    if layout.rotary_dim == states.shape[-1]:
        return rotated
    rest = states[..., layout.rotary_dim :]
    return torch.cat([rotated, rest.expand(*rotated.shape[:-1], -1)], dim=-1)


def rotate_into(
    out: Tensor, states: Tensor, cos: Tensor, sin: Tensor, layout: RotaryLayout
) -> None:
    """Rotate keys ``[heads, tokens, head_dim]``, and write them to ``out``, rounded to its dtype.

    ``out`` may be a view of a larger tensor. ``cos`` and ``sin`` are ``[tokens, rotary_dim]``.
    """
    is_trained = torch.is_grad_enabled() and states.requires_grad
    if states.is_cuda and not is_trained:
        size, rotary_dim = states.shape[-1], layout.rotary_dim
        kind = states.dtype, out.dtype, size, rotary_dim, layout.pairing
        if (fused := fused_rotation(states.device, *kind)) is not None:
            fused(out, states, cos, sin)
            return
    out[..., : layout.rotary_dim] = _rotated(states, cos, sin, layout)
    out[..., layout.rotary_dim :] = states[..., layout.rotary_dim :]


def _rotated(states: Tensor, cos: Tensor, sin: Tensor, layout: RotaryLayout) -> Tensor:
    """Rotate the rotary dimensions of ``states`` in float32, and return them without the others."""
    rotary = states[..., : layout.rotary_dim].float()
    return (rotary * cos).addcmul_(_partners(rotary, layout.pairing), sin)


_PROBE_SHAPE = 3, 37
"""Heads and tokens of the keys that test the fused rotation, enough for several programs."""


@cache
def fused_rotation(
    device: torch.device,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    size: int,
    rotary_dim: int,
    pairing: Pairing,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    """Compile ``rotation.rotate_fused`` for these dtypes and sizes, and compare it with
    :func:`rotate`. Raises ``UnsupportedModelError`` if the results differ.

    Returns None if Triton is not installed, or fails to compile or run the kernel.
    """
    try:
        from blockattn_rag.kv.rotation import rotate_fused
    except ImportError:
        return None

    def fused(out: Tensor, states: Tensor, cos: Tensor, sin: Tensor) -> None:
        with torch.cuda.device(device):
            rotate_fused(out, states, cos, sin, interleaved=pairing == "interleaved")

    layout = RotaryLayout(1 / torch.arange(1.0, rotary_dim / 2 + 1), pairing)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(*_PROBE_SHAPE, size, generator=generator).to(device, dtype)
    cos, sin = layout.cos_sin(7 * torch.arange(_PROBE_SHAPE[1]), device)
    out = torch.empty_like(keys, dtype=out_dtype)
    try:
        fused(out, keys, cos, sin)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 -- Triton raises compiler errors
        _logger.warning(
            "Keys are rotated with PyTorch, which is slower, because Triton failed: %s", error
        )
        return None
    expected = rotate(keys.double(), cos.double(), sin.double(), layout)
    # The kernel computes in float32, even if `out` has a higher precision.
    rounding = max(torch.finfo(out_dtype).eps, torch.finfo(torch.float32).eps)
    difference, allowed = relative_error(out.double(), expected), 2 * rounding
    if not difference <= allowed:
        raise UnsupportedModelError(
            f"Triton's rotation of {dtype} keys of size {size} ({pairing}, {rotary_dim} rotary) "
            f"on {device} differs from PyTorch's by {difference:.2g}, expected at most "
            f"{allowed:.2g}. Update PyTorch and Triton, or uninstall Triton, which is optional"
        )
    return fused


def _partners(states: Tensor, pairing: Pairing) -> Tensor:
    """Swap the two dimensions of each pair."""
    if pairing == "half":
        return states.roll(states.shape[-1] // 2, dims=-1)
    return states.reshape(*states.shape[:-1], states.shape[-1] // 2, 2).flip(-1).flatten(-2)


def _join(first: Tensor, second: Tensor, pairing: Pairing) -> Tensor:
    if pairing == "half":
        return torch.cat([first, second], dim=-1)
    return torch.stack([first, second], dim=-1).flatten(-2)


class LayoutFit(NamedTuple):
    """Best layout for one layer's keys, and the maximum ``relative_error`` of shifted keys."""

    layout: RotaryLayout
    error: float


def fit_layout(
    at_zero: Tensor, shifted: Sequence[tuple[int, Tensor]], candidates: Iterable[Tensor]
) -> LayoutFit:
    """Find a layer's rotary layout by comparing keys computed at several positions.

    Args:
        at_zero: Keys of a probe at positions 0..tokens-1, ``[heads, tokens, head_dim]``.
        shifted: Pairs of an offset, and the same probe's keys at positions starting there.
        candidates: Frequency tables to try, in addition to "no rotation".
    """
    layouts = [NO_ROTATION]
    for frequencies in candidates:
        if 0 < 2 * frequencies.numel() <= at_zero.shape[-1]:
            layouts += [RotaryLayout(frequencies.float().cpu(), p) for p in get_args(Pairing)]

    def fit(layout: RotaryLayout) -> LayoutFit:
        moved = ((shift_positions(at_zero.float(), o, layout), keys) for o, keys in shifted)
        return LayoutFit(layout, max(relative_error(found, keys.float()) for found, keys in moved))

    return min(map(fit, layouts), key=lambda one: one.error)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Maximum absolute difference, divided by the maximum absolute expected value."""
    scale = expected.abs().max().clamp_min(1e-30)
    return float((found - expected).abs().max() / scale)
