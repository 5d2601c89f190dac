from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MambaConfig

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv import KVDtype
from blockattn_rag.lab.planning import (
    SHAPES,
    Machine,
    floating_type,
    footprint,
    plan_capacity,
    prefill_flops,
    shape_config,
)
from blockattn_rag.model import BlockModel, EncodeRequest
from tests.models import tiny_model, tiny_tokenizer

LLAMA_8B = shape_config("8b")
GIB = 1 << 30
planned = partial(plan_capacity, LLAMA_8B, torch.bfloat16)
KINDS: tuple[KVDtype, ...] = ("model", "int8")


def test_an_8b_llama_takes_128_kib_per_token_in_16_bits() -> None:
    found = footprint(LLAMA_8B, torch.bfloat16)
    assert found.bytes_per_token == 128 * 1024
    assert found.weight_bytes == pytest.approx(16.06e9, rel=0.001)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gemma3_text", "gpt_neox", "mixtral"])
def test_weights_and_blocks_have_the_planned_sizes(family: str) -> None:
    model = BlockModel(tiny_model(family), tiny_tokenizer())
    [[kv]] = model.encode([EncodeRequest([*range(30)], "", "")])
    plain, int8 = (footprint(model.config, torch.float32, kind) for kind in KINDS)
    assert plain.bytes_per_token == model.bytes_per_token
    assert (plain.block_bytes(30), int8.block_bytes(30)) == (kv.nbytes, kv.quantized().nbytes)
    assert plain.weight_bytes == sum(p.numel() * 4 for p in model.hf_model.parameters())


def test_int8_halves_the_bytes_from_disk_and_adds_memory_traffic() -> None:
    machine = Machine(
        memory_bytes=64 * GIB, disk_bytes=1000 * GIB, operations_per_s=1e18,
        device_bytes_per_s=1e10, disk_bytes_per_s=1e9,
    )  # fmt: skip
    sizes = {"passages": 1000, "passage_tokens": 512, "top_k": 4}
    found = planned(machine, **sizes, kv_dtype="int8")
    layers, heads, channels = 32, 8, 128
    codes = 2 * layers * heads * channels * 512
    assert found.passage_bytes == codes + layers * heads * 4 * (512 + channels)
    assert found.passage_bytes / (64 << 20) == pytest.approx(0.51, abs=0.001)
    # Dequantized blocks are written and read again.
    read = 4 * found.passage_bytes + 2 * 4 * (64 << 20)
    memory, disk = found.tiers
    assert memory.ttft_s == pytest.approx((found.footprint.weight_bytes + read) / 1e10)
    assert disk.ttft_s == pytest.approx(memory.ttft_s + 4 * found.passage_bytes / 1e9)
    with pytest.raises(ValueError, match="found 'int4'"):
        planned(machine, **sizes, kv_dtype="int4")  # type: ignore[arg-type]


def test_times_and_capacity_follow_from_operations_bytes_and_speeds() -> None:
    machine = Machine(
        memory_bytes=64 * GIB, disk_bytes=1000 * GIB, gpu_bytes=80 * GIB, operations_per_s=1e12,
        device_bytes_per_s=1e15, transfer_bytes_per_s=10e9, disk_bytes_per_s=1e9,
    )  # fmt: skip
    found = planned(machine, passages=1000, passage_tokens=512, top_k=4)
    assert found.passage_bytes == 64 << 20
    assert found.total_bytes == 1000 * (64 << 20)
    assert found.full_ttft_s == pytest.approx(prefill_flops(LLAMA_8B, 2048 + 50) / 1e12)
    assert found.ingest_s == pytest.approx(1000 * prefill_flops(LLAMA_8B, 512) / 1e12)
    gpu, memory, disk = found.tiers
    reuse = prefill_flops(LLAMA_8B, 50, 2048) / 1e12
    moved = 4 * (64 << 20)
    assert gpu.ttft_s == pytest.approx(reuse)
    assert memory.ttft_s == pytest.approx(reuse + moved / 10e9)
    assert disk.ttft_s == pytest.approx(reuse + moved / 10e9 + moved / 1e9)
    assert gpu.passages == int((0.9 * 80 * GIB - found.footprint.weight_bytes) // (64 << 20))
    assert (memory.passages, disk.passages) == (1024, 16000)


def test_a_short_forward_is_limited_by_reading_the_weights() -> None:
    machine = Machine(64 * GIB, GIB, operations_per_s=1e18, device_bytes_per_s=1e10)
    found = planned(machine, passages=1, passage_tokens=8, top_k=1)
    assert found.full_ttft_s == pytest.approx(found.footprint.weight_bytes / 1e10)


def test_weights_reduce_the_free_memory_which_may_be_too_small() -> None:
    found = planned(Machine(8 * GIB, GIB), passages=1, passage_tokens=512)
    assert [tier.name for tier in found.tiers] == ["memory", "disk"]
    assert found.tiers[0].passages == 0


def test_a_model_without_keys_and_values_is_refused() -> None:
    message = "A mamba model has no layer with keys and values"
    with pytest.raises(UnsupportedModelError, match=message):
        footprint(MambaConfig(num_hidden_layers=1, hidden_size=16), torch.float32)


def test_a_store_pays_off_above_the_break_even_read_speed() -> None:
    machine = Machine(GIB, GIB, operations_per_s=6e14, device_bytes_per_s=2e12)
    sizes: Any = {"passages": 1000, "passage_tokens": 512, "top_k": 10}
    speed = planned(machine, **sizes).break_even_bytes_per_s
    assert speed is not None
    # An 8B model at 600 * 10^12 operations/s produces 128 KiB per token in about 23.5 microseconds.
    assert speed == pytest.approx(5.6e9, rel=0.1)
    for factor, pays in ((1.01, True), (0.99, False)):
        estimate = planned(replace(machine, disk_bytes_per_s=factor * speed), **sizes)
        assert (estimate.tiers[1].ttft_s < estimate.full_ttft_s) is pays


def test_reuse_that_saves_nothing_has_no_break_even() -> None:
    slow = Machine(memory_bytes=GIB, disk_bytes=GIB, operations_per_s=1e18, device_bytes_per_s=1e9)
    found = planned(slow, passages=10, passage_tokens=512)
    assert found.break_even_bytes_per_s is None
    assert all(tier.ttft_s >= found.full_ttft_s for tier in found.tiers)


def test_operations_of_an_8b_model_equal_published_counts() -> None:
    full = prefill_flops(LLAMA_8B, 32768 + 50)
    block = prefill_flops(LLAMA_8B, 50, 32768)
    assert full == pytest.approx(740e12, rel=0.01)
    assert block == pytest.approx(1.56e12, rel=0.01)
    # Block-Attention, table 3: 99.8 % fewer operations at 32K.
    assert 1 - block / full == pytest.approx(0.998, abs=0.0005)


def test_a_prefill_in_two_steps_costs_the_same_as_in_one() -> None:
    config = shape_config("tiny")
    output_layer = 2 * config.hidden_size * config.vocab_size
    parts = prefill_flops(config, 30) + prefill_flops(config, 12, 30) - output_layer
    assert prefill_flops(config, 42) == parts


def test_only_active_experts_are_counted() -> None:
    dense = SimpleNamespace(**SHAPES["tiny"])
    experts = SimpleNamespace(**{**SHAPES["tiny"], "intermediate_size": 32}, num_experts_per_tok=2)
    assert prefill_flops(experts, 10) == prefill_flops(dense, 10)
    small = SimpleNamespace(**SHAPES["tiny"], num_experts_per_tok=4, moe_intermediate_size=16)
    assert prefill_flops(small, 10) == prefill_flops(dense, 10)


@pytest.mark.parametrize("name", ["int8", "float7"])
def test_non_floating_point_dtypes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"found '{name}'"):
        floating_type(name)
