"""Packed weights: a question's few tokens through a model's linear layers, on the CPU.

A plain matrix product of 4 to some 200 rows spends much of its time on rearranging the weights for
the processor, again in every call. oneDNN can do that once: for a question, and for each step of a
batch. For a single row, and for whole prompts, the plain product stays.
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

#: Packed weights are a second copy; it may take this share of the memory that is free.
_SHARE_OF_MEMORY = 0.25
# Rows of input for which packed weights are faster than plain ones (benchmarks/packing.py).
_PACKED_ROWS = range(4, 256)


class _PackedForward:
    """What a linear layer does instead of its own ``forward``."""

    def __init__(self, linear: nn.Linear) -> None:
        # Weak: the layer holds this object, and a cycle would keep its weights in memory.
        self._linear = weakref.ref(linear)
        self._packed: Tensor | None = None
        self._made_of: tuple[int, int] | None = None

    def __reduce__(self) -> Any:
        return type(self), (self._linear(),)  # a copy packs the copy's weights

    def __call__(self, input: Tensor) -> Tensor:
        linear: Any = self._linear()
        weight, rows = linear.weight, input.numel() // input.shape[-1]
        if torch.is_grad_enabled() or not _is_plain(weight):
            # About to be trained, or moved since. An optimizer's writes may leave no trace.
            self._packed = None
        elif rows in _PACKED_ROWS and _takes(input) and _is_available():
            return self.product(input)
        return nn.functional.linear(input, weight, linear.bias)

    def product(self, input: Tensor) -> Tensor:
        """The layer's output by way of the packed weights, for any number of rows."""
        linear: Any = self._linear()
        made_of = (linear.weight.data_ptr(), linear.weight._version)
        if self._packed is None or made_of != self._made_of:
            self._packed, self._made_of = _pack(linear.weight), made_of
        return _packed_linear(input, self._packed, linear.bias)


def pack_linears(hf_model: nn.Module) -> int:
    """Pack the weights of a model's linear layers, if that pays and fits; the layers packed.

    Only float32 on an x86 processor pays. The model's parameters are not touched: it can be saved
    and trained as before. Weights that are changed while an engine answers by them need a new
    engine, as they do for the sake of stored KV.
    """
    linears = [module for module in hf_model.modules() if _can_pack(module)]
    size = sum(linear.weight.nbytes for linear in linears)
    if not linears or not _is_available() or size > free_memory() * _SHARE_OF_MEMORY:
        return 0
    for linear in linears:
        linear.forward = _PackedForward(linear)  # type: ignore[method-assign]
    return len(linears)


def _can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether this is an ordinary linear layer, whose ``forward`` is its own or ours."""
    if type(module) is not nn.Linear:
        return False
    forward = vars(module).get("forward")
    # A layer that was packed before is packed anew, because its weights may have changed unseen.
    return _is_plain(module.weight) and (forward is None or type(forward) is _PackedForward)


def _is_plain(weight: Tensor) -> bool:
    """Float32 on the CPU, and not some quantised tensor that only says so."""
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
    """Whether this build of PyTorch packs weights, and rightly: these are not public functions."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(1, 8, 48, generator=generator)
    weight, bias = torch.randn(40, 48, generator=generator), torch.randn(40, generator=generator)
    try:
        found = _packed_linear(input, _pack(weight), bias)
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("this PyTorch (%s) cannot pack weights: %s", torch.__version__, error)
        return False
    return relative_error(found, nn.functional.linear(input, weight, bias)) < 1e-5


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: what the machine has, or its container is allowed."""
    free = psutil.virtual_memory().available
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            allowed, taken = (int((root / name).read_text("utf-8")) for name in (limit, used))
        except (OSError, ValueError):  # no such file, or "max"
            continue
        free = min(free, max(0, allowed - taken))
    return free
