"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021, section 4.1)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Lora:
    """What is added to the output of one linear layer: ``scaling * up(down(input))``.

    Args:
        down: ``[rank, input size]``, PEFT's ``lora_A``.
        up: ``[output size, rank]``, PEFT's ``lora_B``.
        alpha: ``scaling`` is ``alpha / rank``; or
        use_rslora: ``alpha / sqrt(rank)`` (Kalajdzievski 2023).
    """

    def __init__(
        self, down: nn.Parameter, up: nn.Parameter, alpha: float, *, use_rslora: bool = False
    ) -> None:
        self.down, self.up = down, up
        self.alpha, self.use_rslora = alpha, use_rslora
        self.scaling = alpha / (math.sqrt(self.rank) if use_rslora else self.rank)
        self._converted: tuple[object, tuple[Tensor, Tensor]] | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def __call__(self, input: Tensor, output: Tensor) -> Tensor:
        """The layer's ``output`` ``[..., output size]`` with the adapter; in the output's dtype."""
        down, up = self._matrices(output.dtype, output.device)
        added = linear(linear(input.to(output.dtype), down), up)
        return torch.add(output, added, alpha=self.scaling)

    def _matrices(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Both matrices as the layer computes."""
        matrices = self.down, self.up
        if self.down.dtype == dtype and self.down.device == device:
            return matrices
        if self.down.requires_grad or self.up.requires_grad:
            # In training. An optimizer's writes may leave no trace.
            return self.down.to(device, dtype), self.up.to(device, dtype)
        made_of = (dtype, device, *((m.data_ptr(), m._version) for m in matrices))
        if self._converted is None or self._converted[0] != made_of:
            with torch.inference_mode(False), torch.no_grad():  # usable in a backward pass too
                copies = self.down.to(device, dtype), self.up.to(device, dtype)
            self._converted = made_of, copies
            return copies
        return self._converted[1]


def new_lora(layer: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> Lora:
    """An adapter that changes nothing before it is trained, as PEFT initialises it.

    ``down`` is drawn as a new linear layer's weights are (Kaiming, uniform); ``up`` is zero.
    ``generator``: of the CPU, so that a seed means the same on all devices.
    """
    bound = 1 / math.sqrt(layer.in_features)
    down = (torch.rand(rank, layer.in_features, generator=generator) * 2 - 1) * bound
    return placed(down, torch.zeros(layer.out_features, rank), alpha, layer, trained=True)


def placed(
    down: Tensor,
    up: Tensor,
    alpha: float,
    layer: nn.Linear,
    *,
    use_rslora: bool = False,
    trained: bool = False,
) -> Lora:
    """An adapter of these matrices in float32, on the layer's device."""
    device = torch.device("cpu") if layer.weight.is_meta else layer.weight.device
    with torch.inference_mode(False):
        down, up = (
            nn.Parameter(m.to(device, torch.float32, copy=True), requires_grad=trained)
            for m in (down, up)
        )
    return Lora(down, up, alpha, use_rslora=use_rslora)


def lora_digest(layers: Mapping[str, Lora]) -> str:
    """sha256 (64 hex digits) of what adapters compute: layers, scalings, matrices."""
    digest = hashlib.sha256()
    for path, lora in sorted(layers.items()):
        header = [path, float(lora.scaling), list(lora.down.shape), list(lora.up.shape)]
        digest.update(json.dumps(header).encode())
        for matrix in (lora.down, lora.up):
            digest.update(matrix.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()
