"""Packed weights, which speed up linear layers on the CPU for short inputs.

A matrix product of 4 to 255 rows spends much of its time rearranging the weights for the CPU, on
every call. oneDNN can rearrange (pack) them once. Packed weights speed up questions and batched
decoding steps. Fewer rows and long prompts use the plain product.
"""

from __future__ import annotations

import logging
import platform
import weakref
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import psutil
import torch
from torch import Tensor, nn

from blockattn_rag.kv.rope import relative_error

logger = logging.getLogger("blockattn_rag")

# Maximum share of free memory for packed weights, which are a second copy.
_SHARE_OF_MEMORY = 0.25
# Numbers of input rows for which packed weights are faster (``benchmarks/packing.py``).
_PACKED_ROWS = range(4, 256)


class _PackedForward:
    """Replacement for a linear layer's ``forward``."""

    def __init__(self, linear: nn.Linear) -> None:
        # A strong reference would create a cycle, which would keep the layer's weights in memory.
        self._linear = weakref.ref(linear)
        self._packed: Tensor | None = None
        self._made_of: tuple[int, int] | None = None

    def __reduce__(self) -> Any:
        # Packed weights are not copied, because a copied layer must pack its own weights.
        return type(self), (self._linear(),)

    def __call__(self, input: Tensor) -> Tensor:
        linear: Any = self._linear()
        weight, rows = linear.weight, input.numel() // input.shape[-1]
        if torch.is_grad_enabled() or not _is_plain(weight):
            # Drop the copy if the layer is trained or moved: optimizer steps are not detected.
            self._packed = None
        elif rows in _PACKED_ROWS and _takes(input) and _is_available():
            return self.product(input)
        return nn.functional.linear(input, weight, linear.bias)

    def product(self, input: Tensor) -> Tensor:
        """Compute the layer's output with packed weights, for any number of rows."""
        linear: Any = self._linear()
        made_of = (linear.weight.data_ptr(), linear.weight._version)
        if self._packed is None or made_of != self._made_of:
            self._packed, self._made_of = _pack(linear.weight), made_of
        return _packed_linear(input, self._packed, linear.bias)


def pack_linears(hf_model: nn.Module) -> int:
    """Make a model's linear layers pack their weights on first use, if this is faster.

    Only float32 on x86 CPUs benefits. No layer is packed if the copies would exceed a quarter of
    the free memory. The model's parameters stay unchanged, so it can still be saved and trained.
    Returns the number of layers that will be packed.
    """
    linears = [module for module in hf_model.modules() if _can_pack(module)]
    size = sum(linear.weight.nbytes for linear in linears)
    if not linears or not _is_available() or size > free_memory() * _SHARE_OF_MEMORY:
        return 0
    for linear in linears:
        linear.forward = _PackedForward(linear)  # type: ignore[method-assign]
    return len(linears)


def _can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a plain linear layer with the original or the packed ``forward``."""
    if type(module) is not nn.Linear:
        return False
    forward = vars(module).get("forward")
    # Packed layers are packed again, because undetected weight changes are possible.
    return _is_plain(module.weight) and (forward is None or type(forward) is _PackedForward)


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight is a plain float32 tensor on the CPU. Quantized subclasses are not plain."""
    is_float = weight.is_cpu and weight.dtype == torch.float32 and not weight.is_inference()
    return is_float and type(weight) in (Tensor, nn.Parameter)


def _takes(input: Tensor) -> bool:
    return input.is_cpu and input.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 64)


def _packed_linear(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


@cache
def _is_available() -> bool:
    """Whether this build of PyTorch has private functions that pack weights correctly."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(1, 8, 48, generator=generator)
    weight, bias = torch.randn(40, 48, generator=generator), torch.randn(40, generator=generator)
    try:
        found = _packed_linear(input, _pack(weight), bias)
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("PyTorch %s cannot pack weights: %s", torch.__version__, error)
        return False
    return relative_error(found, nn.functional.linear(input, weight, bias)) < 1e-5


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Free memory in bytes, taking the memory limit of the container into account."""
    free = psutil.virtual_memory().available
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            allowed, taken = (int((root / name).read_text("utf-8")) for name in (limit, used))
        except (OSError, ValueError):  # The file does not exist, or contains "max".
            continue
        free = min(free, max(0, allowed - taken))
    return free
