"""What a fixed probe gives, in a few coarse numbers: the net under all that a fingerprint lists.

Weights, settings and hooks are compared exactly. What none of them shows, such as the inside of an
object that a hook holds, or a patched function of a library, still changes keys and values. So four
numbers over all layers' keys and values are part of the fingerprint: the sum of the logarithms of
their sizes, and of projections on fixed random signs, each divided by the root of the number of
layers. A change of everything by a factor, or of some layers' directions, moves them by about 1.

They are rounded, since machines, thread counts and attention implementations round differently.
Measured (llama, qwen3, gemma2, phi of 3 to 30 layers; sdpa and eager attention; 1 and 2 threads),
that moves each number by at most 5e-7 in float32, 3e-4 in float16 and 7e-3 in bfloat16. A number
that moves by d comes to stand on the other side of a boundary of rounding with probability
d / step. So two machines that round differently disagree over one model in some 25,000 in float32
(4 * 5e-7 / 0.05), and over one in a hundred in bfloat16 (4 * 3e-3 / 1, the mean). They then share
no stored KV; never the other way round.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockattn_rag.model.probe import probe_states

_FINE_STEP, _COARSE_STEP = 0.05, 1.0

# A model whose state holds other types computes in 16 bits, or quantises as it goes.
_FINE_TYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)


@torch.inference_mode()
def kv_summary(hf_model: PreTrainedModel) -> list[int | None]:
    """Four whole numbers; None stands for one that is not finite."""
    step = _FINE_STEP if _is_fine(hf_model) else _COARSE_STEP
    layers = probe_states(hf_model)
    numbers = [number for states in zip(*layers, strict=True) for number in _numbers(states)]
    return [round(number / step) if math.isfinite(number) else None for number in numbers]


def _is_fine(hf_model: nn.Module) -> bool:
    return all(
        type(value) in (Tensor, nn.Parameter) and value.dtype in _FINE_TYPES
        for value in hf_model.state_dict().values()
    )


def _numbers(states: tuple[Tensor, ...]) -> tuple[float, float]:
    """Size and projection of all layers' keys, or values, ``[heads, tokens, size]`` each."""
    generator = torch.Generator().manual_seed(5)
    size = projection = 0.0
    for state in states:
        data = state.double().cpu()
        root = data.pow(2).mean().sqrt().clamp_min(1e-12)
        signs = torch.randint(0, 2, data.shape, generator=generator) * 2 - 1
        size += float(root.log())
        projection += float((data * signs).sum() / root) / math.sqrt(data.numel())
    return size / math.sqrt(len(states)), projection / math.sqrt(len(states))
