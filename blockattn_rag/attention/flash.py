"""Flash attention kernels for CUDA, from PyTorch and from installed flash-attn packages.

Shapes: ``B`` requests, ``H`` query heads, ``K`` key-value heads, ``Q`` queries, ``N`` key tokens,
``D`` head size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

FlashKernel = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""Function that computes attention of queries ``[B, H, Q, D]`` to keys and values ``[B, K, N, D]``
in a 16-bit dtype. ``H`` is a multiple of ``K``. The other arguments are the scale of the scores,
and whether attention is causal, with the last query aligned to the last key. Returns the output
``[B, H, Q, D]`` in the query's dtype, and the log-sum-exp ``[B, H, Q]`` in float32."""

PYTORCH = "PyTorch"


class _Case(NamedTuple):
    """Test case for kernels, with at least two query heads per key-value head."""

    rows: int
    heads: int
    queries: int
    keys: int
    is_causal: bool

    def states(
        self, device: torch.device, dtype: torch.dtype, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        of_keys = min(8, self.heads // 2), self.keys
        query, key, value = (
            torch.randn(self.rows, *shape, size, generator=generator).to(device, dtype)
            for shape in ((self.heads, self.queries), of_keys, of_keys)
        )
        return query, key, value


_PROBES = [_Case(2, 4, *rest) for rest in ((1, 300, False), (70, 300, False), (70, 300, True))]

_TIMED = _Case(1, 32, 64, 8192, is_causal=True)
"""Case that kernels are timed on: a question after its passages."""

_MARGIN = 1.05
"""Minimum speedup for a package's kernel to replace PyTorch's. Timing noise is smaller."""

_logger = logging.getLogger(__name__)


@cache
def fastest_flash(device: torch.device, dtype: torch.dtype, size: int) -> FlashKernel:
    """Return the fastest of ``exact_kernels``, timed once per process for the same arguments.
    Without an installed package, return PyTorch's kernel without testing it."""
    if not _packages(device):
        return _by_pytorch
    kernels = exact_kernels(device, dtype, size)
    states = _TIMED.states(device, dtype, size)
    times_s = {
        name: elapsed_s(partial(kernel, *states, size**-0.5, _TIMED.is_causal), device)
        for name, kernel in kernels.items()
    }
    _logger.info("Flash kernel timings in seconds: %s", times_s)
    if not times_s or times_s.get(PYTORCH, math.inf) <= _MARGIN * min(times_s.values()):
        return _by_pytorch
    return kernels[min(times_s, key=times_s.__getitem__)]


def exact_kernels(device: torch.device, dtype: torch.dtype, size: int) -> dict[str, FlashKernel]:
    """Return the available kernels that match float64 attention up to rounding, by name."""
    kernels = {PYTORCH: _by_pytorch, **_packages(device)}
    return {n: kernel for n, kernel in kernels.items() if _is_exact(n, kernel, device, dtype, size)}


def elapsed_s(work: Callable[[], object], device: torch.device) -> float:
    """Measure the minimum duration of several runs on a GPU, in seconds."""
    times_s: list[float] = []
    make: Any = torch.cuda.Event
    with torch.cuda.device(device):
        for _ in range(7):  # The first runs compile kernels.
            first, last = make(enable_timing=True), make(enable_timing=True)
            first.record()
            work()
            last.record()
            last.synchronize()
            times_s.append(first.elapsed_time(last) / 1000)
    return min(times_s)


def aligned(states: Tensor) -> Tensor:
    """Return ``states``, or a copy if its rows are not contiguous and aligned to 16 bytes. CUDA
    kernels assume this alignment even along dimensions of length 1."""
    *steps, last = states.stride()
    begins = (step * states.itemsize % 16 for step in (*steps, states.storage_offset()))
    if last == 1 and not any(begins):
        return states
    return states.clone(memory_format=torch.contiguous_format)


def _by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    query, key, value = map(aligned, (query, key, value))
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, False, scale=scale
    )
    return output, lse


def _by_package(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Call a package's ``flash_attn_func``, which expects states ``[B, tokens, heads, D]``."""
    states = (aligned(one).transpose(1, 2) for one in (query, key, value))
    output, lse, *_ = function(*states, softmax_scale=scale, causal=is_causal)
    return output.transpose(1, 2), lse


# With few queries, most of a GPU is idle unless keys are split. 0 lets the package choose.
_SPLIT = {"num_splits": 0}
_PACKAGES: dict[str, tuple[str, dict[str, Any], range]] = {
    "FlashAttention 2": ("flash_attn", {"return_attn_probs": True}, range(8, 100)),
    "FlashAttention 3": (
        "flash_attn_interface",
        {"return_attn_probs": True} | _SPLIT,
        range(9, 10),
    ),
    "FlashAttention 4": ("flash_attn.cute", {"return_lse": True} | _SPLIT, range(9, 100)),
}
"""By name: module, options of its ``flash_attn_func``, supported major compute capabilities."""


@cache
def _packages(device: torch.device) -> dict[str, FlashKernel]:
    """Return the kernels of installed packages that support this device, by name."""
    kernels: dict[str, FlashKernel] = {}
    for name, (module, options, capabilities) in _PACKAGES.items():
        try:
            function = import_module(module).flash_attn_func
        except Exception as error:  # noqa: BLE001 -- for example, built for another PyTorch
            _logger.info("Not using %s, because it cannot be imported: %s", name, error)
            continue
        if torch.cuda.get_device_capability(device)[0] in capabilities:
            kernels[name] = partial(_by_package, partial(function, **options))
    return kernels


@torch.inference_mode()
def _is_exact(
    name: str, kernel: FlashKernel, device: torch.device, dtype: torch.dtype, size: int
) -> bool:
    scale = size**-0.5
    for case in _PROBES:
        states = case.states(device, dtype, size)
        try:
            output, lse = kernel(*states, scale, case.is_causal)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 -- packages raise compiler errors
            _logger.warning("Not using %s, because it failed: %s", name, error)
            return False
        query, key, value = (one.double() for one in states)
        key, value = (one.repeat_interleave(2, dim=1) for one in (key, value))
        scores = query @ key.mT * scale
        if case.is_causal:
            seen = torch.ones_like(scores, dtype=torch.bool).tril(case.keys - case.queries)
            scores = scores.masked_fill(~seen, -torch.inf)
        of_output = (output - scores.softmax(-1) @ value).abs().max() / value.abs().max()
        of_lse = (lse - scores.logsumexp(-1)).abs().max()
        if not (of_output <= 2 * torch.finfo(dtype).eps and of_lse <= 1e-3):
            _logger.warning(
                "Not using %s: its output is off by %.2g, and its log-sum-exp by %.2g",
                *(name, float(of_output), float(of_lse)),
            )
            return False
    return True
