"""Packed weights: a question's few tokens through a model's linear layers, on the CPU.

A plain matrix product of 4 to some 200 rows spends most of its time on rearranging the weights for
the processor, again in every call. oneDNN can do that once. A question then takes half as long, and
so does each step of a batch; for a single row, and for whole prompts, the plain product stays.
"""

from __future__ import annotations

import logging
import platform
from typing import Any, TypeGuard

import psutil
import torch
from torch import Tensor, nn

from blockattn_rag.rope import relative_error

logger = logging.getLogger("blockattn_rag")

#: Rows of input for which packed weights are faster (docs/benchmarks.md).
_LEAST_ROWS, _MOST_ROWS = 4, 255

#: Packed weights are a second copy; it may take this share of the memory that is free.
_SHARE_OF_MEMORY = 0.25


class _PackedForward:
    """What a linear layer does instead of its own ``forward``."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._packed: Tensor | None = None
        self._made_of: tuple[int, int] | None = None

    def __reduce__(self) -> Any:
        return type(self), (self._linear,)  # a copy packs the copy's weights

    def __call__(self, input: Tensor) -> Tensor:
        linear, rows = self._linear, input.numel() // input.shape[-1]
        # Gradients need the weights themselves, and so does a model that was moved since.
        fits = _LEAST_ROWS <= rows <= _MOST_ROWS and torch.is_inference_mode_enabled()
        if fits and input.dtype == linear.weight.dtype == torch.float32 and input.is_cpu:
            return self.product(input)
        return nn.functional.linear(input, linear.weight, linear.bias)

    def product(self, input: Tensor) -> Tensor:
        """The layer's output by way of the packed weights, for any number of rows."""
        return _packed_linear(input, self.packed(), self._linear.bias)

    def packed(self) -> Tensor:
        """The packed weights; packed again if the weights have changed."""
        weight = self._linear.weight
        made_of = (weight.data_ptr(), weight._version)
        if self._packed is None or made_of != self._made_of:
            self._packed, self._made_of = _pack(weight), made_of
        return self._packed


def pack_linears(hf_model: nn.Module) -> int:
    """Pack the weights of a model's linear layers, if that pays and fits; the layers packed.

    Only float32 on an x86 processor pays. The model's parameters are not touched: it can be saved
    and trained as before.
    """
    linears = [m for m in hf_model.modules() if _is_plain(m)]
    size = sum(linear.weight.nbytes for linear in linears)
    free = psutil.virtual_memory().available
    if not linears or not _is_available() or size > free * _SHARE_OF_MEMORY:
        return 0
    for linear in linears:
        forward = _PackedForward(linear)
        forward.packed()
        linear.forward = forward  # type: ignore[method-assign]
    return len(linears)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """A float32 linear layer on the CPU whose ``forward`` nobody has replaced."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    return weight.is_cpu and weight.dtype == torch.float32 and not weight.is_inference()


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 64)


def _packed_linear(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


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
