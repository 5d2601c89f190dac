"""Capacity planning: disk, memory and times for a collection, estimated from a model's config."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.quantization import KVDtype, check_kv_dtype
from blockattn_rag.model.kinds import new_cache

_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
_VALUES = {
    "tiny": (2, 32, 4, 2, 8, 64, 512),  # For tests.
    "135m": (30, 576, 9, 3, 64, 1536, 49152),  # SmolLM2-135M
    "1b": (16, 2048, 32, 8, 64, 8192, 128256),  # Llama-3.2-1B
    "8b": (32, 4096, 32, 8, 128, 14336, 128256),  # Llama-3-8B
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    shape: dict(zip(_FIELDS, values, strict=True)) for shape, values in _VALUES.items()
}
"""Values for ``LlamaConfig``, by shape name."""


def shape_config(shape: str, **settings: Any) -> Any:
    return LlamaConfig(**SHAPES[shape], **settings)


def floating_type(name: str) -> torch.dtype:
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"Expected a floating-point dtype such as bfloat16, found {name!r}.")
    return kind


@dataclass(frozen=True, slots=True)
class Machine:
    """Capacities and speeds of a machine.

    Args:
        memory_bytes, disk_bytes: Space for blocks. If the model runs on the CPU, memory also
            contains the weights.
        gpu_bytes: GPU memory. None: the model runs on the CPU.
        operations_per_s: Floating-point operations per second.
        device_bytes_per_s: Memory bandwidth of the device that the model runs on.
        transfer_bytes_per_s, disk_bytes_per_s: Host-to-device and disk read bandwidth.
    """

    memory_bytes: int
    disk_bytes: int
    gpu_bytes: int | None = None
    operations_per_s: float = 1e11
    device_bytes_per_s: float = 1e10
    transfer_bytes_per_s: float = 25e9
    disk_bytes_per_s: float = 2e9

    def forward_s(self, operations: float, read_bytes: float) -> float:
        """Seconds of a forward pass: the longer of computation and memory reads."""
        return max(operations / self.operations_per_s, read_bytes / self.device_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Size in bytes of a model's weights, and of a stored block with the scales of its int8 KV."""

    weight_bytes: int
    bytes_per_token: int
    bytes_per_block: int = 0

    def block_bytes(self, tokens: int) -> int:
        return self.bytes_per_block + tokens * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class CapacityTier:
    """Storage tier for blocks: the number of passages that fit, and the time to first token."""

    name: str
    passages: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Storage, ingestion and time to first token of a collection.

    Args:
        passage_bytes, total_bytes: Sizes of a stored passage and of the collection.
        ingest_s: Seconds to encode the collection.
        full_ttft_s: Time to first token in full mode, in seconds.
        break_even_bytes_per_s: Store bandwidth at which reuse is as fast as a full prefill. None:
            even reuse from memory is not faster.
        tiers: Storage tiers, fastest first.
    """

    footprint: Footprint
    passage_bytes: int
    total_bytes: int
    ingest_s: float
    full_ttft_s: float
    break_even_bytes_per_s: float | None
    tiers: tuple[CapacityTier, ...]


def footprint(config: Any, dtype: torch.dtype, kv_dtype: KVDtype = "model") -> Footprint:
    """Compute the footprint of a model of any architecture from its config, by running it once on
    PyTorch's meta device, which computes only shapes."""
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        # Count elements in this dtype, because some kernels support no other dtype on "meta".
        model = factory.from_config(config, dtype=torch.bfloat16)
        cache = new_cache(config)
        model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    weight_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    layers: list[Any] = [x for x in cache.layers if getattr(x, "keys", None) is not None]
    if not layers:
        raise UnsupportedModelError(
            f"A {config.model_type} model has no layer with keys and values, expected at least one "
            "attention layer."
        )
    states = sum(t.numel() for layer in layers for t in (layer.keys, layer.values))
    if check_kv_dtype(kv_dtype) == "model":
        return Footprint(weight_bytes, states * dtype.itemsize)
    # Values have one scale per head and token. Keys have one per head and channel in each block.
    scale_bytes = torch.float32.itemsize
    token_bytes = states + scale_bytes * sum(layer.values.shape[1] for layer in layers)
    return Footprint(weight_bytes, token_bytes, scale_bytes * sum(x.keys.numel() for x in layers))


def prefill_flops(config: Any, new_tokens: int, cached_tokens: int = 0) -> float:
    """Count the floating-point operations of a causal prefill with one token's logits.

    Includes the matrix products of linear layers, attention and the output layer, with two
    operations per multiply-add. Each of the ``new_tokens`` attends to the cached tokens and to the
    new tokens up to itself.

    Args:
        config: Config of a Llama-like transformers model (gated feed-forward layers). Only the
            active experts are counted.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # Projections: queries and outputs, then keys and values.
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    weights = attention + 3 * hidden * _active_width(config)
    pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2
    layer = 2 * new_tokens * weights + 4 * heads * head_dim * pairs
    return float(config.num_hidden_layers * layer + 2 * hidden * config.vocab_size)


def _active_width(config: Any) -> int:
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return int(config.intermediate_size)
    each = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return int(experts * each + (getattr(config, "shared_expert_intermediate_size", None) or 0))


def plan_capacity(
    config: Any,
    dtype: torch.dtype,
    machine: Machine,
    *,
    passages: int,
    passage_tokens: int,
    top_k: int = 10,
    question_tokens: int = 50,
    kv_dtype: KVDtype = "model",
) -> CapacityPlan:
    """Estimate storage and times for a collection. ``top_k``: Number of passages in a prompt."""
    config = config.get_text_config(decoder=True)
    model = footprint(config, dtype, kv_dtype)
    passage, context = model.block_bytes(passage_tokens), top_k * passage_tokens
    moved = read = top_k * passage
    if kv_dtype != "model":  # Dequantized blocks are written and read once more.
        read += 2 * context * footprint(config, dtype).bytes_per_token
    full = machine.forward_s(prefill_flops(config, context + question_tokens), model.weight_bytes)
    operations = prefill_flops(config, question_tokens, context)
    ttft_s = machine.forward_s(operations, model.weight_bytes + read)
    tiers, room = [], machine.memory_bytes - model.weight_bytes
    if machine.gpu_bytes is not None:
        # Reserve a tenth of the GPU memory for activations and the allocator.
        on_gpu = math.floor(0.9 * machine.gpu_bytes) - model.weight_bytes
        tiers.append(CapacityTier("gpu", max(0, on_gpu) // passage, ttft_s))
        room, ttft_s = machine.memory_bytes, ttft_s + moved / machine.transfer_bytes_per_s
    tiers.append(CapacityTier("memory", max(0, room) // passage, ttft_s))
    from_disk = ttft_s + moved / machine.disk_bytes_per_s
    tiers.append(CapacityTier("disk", machine.disk_bytes // passage, from_disk))
    return CapacityPlan(
        footprint=model,
        passage_bytes=passage,
        total_bytes=passage * passages,
        # In batches, the time to read the weights is negligible.
        ingest_s=passages * prefill_flops(config, passage_tokens) / machine.operations_per_s,
        full_ttft_s=full,
        break_even_bytes_per_s=moved / (full - ttft_s) if full > ttft_s else None,
        tiers=tuple(tiers),
    )


def measured_operations_per_s(dtype: torch.dtype, device: str) -> float:
    """Measure the operations per second of a matrix product. Forward passes reach fewer."""
    size = 8192 if device == "cuda" else 1024  # Smaller products are too fast to time on a GPU.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(6):
        started = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
