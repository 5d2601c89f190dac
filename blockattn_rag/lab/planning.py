"""Capacity planning: storage and times of a collection, estimated from a model's config alone."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.quantization import KVDtype, check_kv_dtype
from blockattn_rag.lab.efficiency.shapes import check_sizes, prefill_flops


@dataclass(frozen=True, slots=True)
class Machine:
    """Capacities and speeds of a machine.

    Args:
        memory_bytes, disk_bytes: Room for blocks (and, on the CPU, for weights in memory).
        gpu_bytes: Memory of the GPU. None: the model runs on the CPU.
        operations_per_s: Floating-point operations per second.
        device_bytes_per_s: Memory bandwidth of the device that runs the model.
        transfer_bytes_per_s: Bandwidth from main memory to the GPU.
        disk_bytes_per_s: Bandwidth of the disk.
        network_bytes_per_s: Bandwidth of a shared store, such as S3. None: no such store.
        network_latency_s: Seconds until that store's first byte.
    """

    memory_bytes: int
    disk_bytes: int
    gpu_bytes: int | None = None
    operations_per_s: float = 1e11
    device_bytes_per_s: float = 1e10
    transfer_bytes_per_s: float = 25e9
    disk_bytes_per_s: float = 2e9
    network_bytes_per_s: float | None = None
    network_latency_s: float = 0.1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name.endswith("_per_s") and value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, found {value}")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model's weights, and of keys and values.

    Args:
        weight_bytes: Bytes of the weights.
        bytes_per_token: Bytes per token of a stored block, scales of quantised values included.
        bytes_per_block: Further bytes of a stored block: the scales of quantised keys.
        dequantised_bytes_per_token: Bytes per token of a quantised block after it is read.
    """

    weight_bytes: int
    bytes_per_token: int
    bytes_per_block: int = 0
    dequantised_bytes_per_token: int = 0

    def block_bytes(self, tokens: int) -> int:
        """Bytes of a stored block."""
        return self.bytes_per_block + tokens * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Clock:
    """Estimates times to first token.

    A forward pass takes as long as its operations, or as reading weights and blocks, whichever is
    longer.

    Args:
        config: Config of a model with gated feed-forward layers.
        footprint: Sizes of the model and its blocks.
        machine: The machine.
    """

    config: Any
    footprint: Footprint
    machine: Machine

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0, read_bytes: int = 0) -> float:
        """Seconds of a prefill that reads the keys and values of cached tokens."""
        operations = prefill_flops(self.config, new_tokens, cached_tokens)
        return self.forward_s(operations, read_bytes)

    def reuse_s(self, question_tokens: int, context_tokens: int, stored_bytes: int) -> float:
        """Seconds of the prefill of a question, with all blocks of its context in memory."""
        # Dequantised blocks are written and read again.
        read = stored_bytes + 2 * context_tokens * self.footprint.dequantised_bytes_per_token
        return self.prefill_s(question_tokens, context_tokens, read)

    def forward_s(self, operations: float, read_bytes: int = 0) -> float:
        """Seconds of a forward pass with these operations."""
        reading = (self.footprint.weight_bytes + read_bytes) / self.machine.device_bytes_per_s
        return max(operations / self.machine.operations_per_s, reading)


@dataclass(frozen=True, slots=True)
class Tier:
    """A storage tier for blocks: GPU memory, main memory, disk or a shared store.

    Args:
        name: Name of the tier.
        passages: Number of passages that fit.
        ttft_s: Seconds to the first token if the blocks are read from this tier.
        pays: Whether ``ttft_s`` is shorter than a full prefill.
    """

    name: str
    passages: int
    ttft_s: float
    pays: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Storage, ingestion and time to first token of a collection.

    Args:
        footprint: Bytes of the model and its blocks.
        passage_bytes, total_bytes: Bytes of a stored passage, and of the collection.
        ingest_s: Seconds to encode the collection.
        full_ttft_s: Seconds of the full prefill that reuse saves.
        break_even_bytes_per_s: Bandwidth of a store at which reuse is as fast as a full prefill.
            None: reuse saves nothing even from memory.
        tiers: Storage tiers, fastest first.
        machine: The machine that was planned for.
    """

    footprint: Footprint
    passage_bytes: int
    total_bytes: int
    ingest_s: float
    full_ttft_s: float
    break_even_bytes_per_s: float | None
    tiers: tuple[Tier, ...]
    machine: Machine


def footprint(config: Any, dtype: torch.dtype, kv_dtype: KVDtype = "model") -> Footprint:
    """The footprint of a model with this config, without creating or loading weights.

    The model is built and run once on PyTorch's meta device, which computes only shapes, so the
    figures hold for any architecture.

    Raises:
        UnsupportedModelError: Layers have no keys and values to store.
    """
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        # Counted in elements; some kernels know only this type there.
        model = factory.from_config(config, dtype=torch.bfloat16)
        cache = DynamicCache()
        model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    weights = sum(parameter.numel() for parameter in model.parameters())
    layers: list[Any] = list(cache.layers)
    if not layers or any(getattr(layer, "keys", None) is None for layer in layers):
        raise UnsupportedModelError(
            f"a {config.model_type} model has layers without keys and values; expected attention "
            "in every layer"
        )
    states = sum(t.numel() for layer in layers for t in (layer.keys, layer.values))
    if check_kv_dtype(kv_dtype) == "model":
        return Footprint(weights * dtype.itemsize, states * dtype.itemsize)
    # Values have one scale per head and token; keys have one per head and channel in each block.
    scale_bytes = torch.float32.itemsize
    return Footprint(
        weight_bytes=weights * dtype.itemsize,
        bytes_per_token=states + scale_bytes * sum(layer.values.shape[1] for layer in layers),
        bytes_per_block=scale_bytes * sum(layer.keys.numel() for layer in layers),
        dequantised_bytes_per_token=states * dtype.itemsize,
    )


def plan(
    config: Any,
    dtype: torch.dtype,
    machine: Machine,
    *,
    passages: int,
    passage_tokens: int,
    top_k: int = 10,
    question_tokens: int = 50,
    kv_dtype: KVDtype = "model",
) -> Plan:
    """Estimate storage and times for a collection of passages.

    Times are those of ``Clock``. Fetching blocks takes additional time. ``blockattn-rag bench``
    measures real times.

    Args:
        config: Config of a model with gated feed-forward layers.
        dtype: Type of weights, keys and values.
        passages: Passages of the collection.
        passage_tokens: Tokens of a passage.
        top_k: Passages of a prompt.
        question_tokens: Tokens of the question.
        kv_dtype: Type of stored keys and values; see ``kv.quantization``.
    """
    check_sizes(passages=passages, passage_tokens=passage_tokens)
    check_sizes(top_k=top_k, question_tokens=question_tokens)
    config = config.get_text_config(decoder=True)
    model = footprint(config, dtype, kv_dtype)
    passage = model.block_bytes(passage_tokens)
    context = top_k * passage_tokens
    moved = top_k * passage
    clock = Clock(config, model, machine)
    full = clock.prefill_s(context + question_tokens)
    reuse = clock.reuse_s(question_tokens, context, moved)
    tiers: list[Tier] = []

    def add(name: str, room: int, ttft_s: float) -> None:
        tiers.append(Tier(name, max(0, room) // passage, ttft_s, ttft_s < full))

    if machine.gpu_bytes is None:
        room, from_memory = machine.memory_bytes - model.weight_bytes, reuse
    else:
        # A tenth of the GPU's memory is for activations and the allocator.
        add("gpu", math.floor(0.9 * machine.gpu_bytes) - model.weight_bytes, reuse)
        room, from_memory = machine.memory_bytes, reuse + moved / machine.transfer_bytes_per_s
    add("memory", room, from_memory)
    add("disk", machine.disk_bytes, from_memory + moved / machine.disk_bytes_per_s)
    if machine.network_bytes_per_s is not None:
        fetching = machine.network_latency_s + moved / machine.network_bytes_per_s
        add("network", passage * passages, from_memory + fetching)
    return Plan(
        footprint=model,
        passage_bytes=passage,
        total_bytes=passage * passages,
        # In batches, reading the weights hardly counts.
        ingest_s=passages * prefill_flops(config, passage_tokens) / machine.operations_per_s,
        full_ttft_s=full,
        break_even_bytes_per_s=moved / (full - from_memory) if full > from_memory else None,
        tiers=tuple(tiers),
        machine=machine,
    )


def measured_operations_per_s(dtype: torch.dtype, device: str) -> float:
    """Operations per second of a matrix product on this machine, which a forward comes close to."""
    size = 8192 if device == "cuda" else 1024  # a GPU would hardly notice the smaller one
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(6):
        started = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
