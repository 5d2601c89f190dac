"""The benchmarks of latency, throughput and memory."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.model.repetition import TEXT_TOKENS

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from efficiency import (
    columns,
    measure_batch,
    measure_decode,
    measure_memory,
    measure_passages,
    measure_recompute,
    measure_shared,
    measure_ttft,
    measure_windows,
)
from measuring import in_turns, peak_bytes
from random_models import Kind, counting_tokenizer, random_llama, random_prompt

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIZES: dict[str, Any] = {"question_tokens": 4, "repeats": 1}


def tiny_engine(window: int | None = None, kind: Kind = "plain") -> BlockAttentionEngine:
    model = random_llama("tiny", max_tokens=256, device="cpu", window=window, kind=kind)
    return BlockAttentionEngine.from_pretrained(
        model, tokenizer=counting_tokenizer(512), resident_bytes=0
    )


def repeating_engine() -> BlockAttentionEngine:
    """Return an engine whose answers repeat one sentence."""
    model: Any = random_llama("tiny", max_tokens=256, device="cpu")
    words = counting_tokenizer(512).backend_tokenizer.to_str().replace('"t7"', '"It is so."')
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=Tokenizer.from_str(words), pad_token="t0")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()
        model.get_input_embeddings().weight.fill_(1)
        model.get_output_embeddings().weight[7] = 1
    return BlockAttentionEngine.from_pretrained(model, tokenizer=tokenizer, resident_bytes=0)


def test_functions_run_in_turns_and_the_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    times = {"a": iter([100.0, 8.0, 10.0, 3.0]), "b": iter([100.0, 1.0, 5.0, 2.0])}

    def way(name: str) -> float:
        calls.append(name)
        return next(times[name])

    assert in_turns({"a": lambda: way("a"), "b": lambda: way("b")}, 3) == {
        "a_s": 8.0, "a_min_s": 3.0, "a_max_s": 10.0, "b_s": 2.0, "b_min_s": 1.0, "b_max_s": 5.0,
    }  # fmt: skip
    assert calls == ["a", "b"] * 4
    with pytest.raises(ValueError, match="Expected repeats of at least 1, found 0"):
        in_turns({"a": lambda: 1.0}, 0)


def test_a_random_prompt_has_exactly_the_requested_tokens() -> None:
    prompt = random_prompt(100, 32, 7, 512)
    assert [len(block.text.split()) for block in prompt.context] == [32, 32, 32, 4]
    assert len(counting_tokenizer(512)(prompt.final)["input_ids"]) == 7


def test_first_tokens_are_measured_on_every_path() -> None:
    rows = measure_ttft(tiny_engine(), [32, 64], block_tokens=16, **SIZES)
    assert [(row["length"], row["blocks"]) for row in rows] == [(32, 2), (64, 4)]
    for row in rows:
        for path in ("full", "copy", "relay", "floor"):
            assert 0 < row[f"{path}_min_s"] <= row[f"{path}_s"] <= row[f"{path}_max_s"]
        assert row["full_over_copy"] == row["full_s"] / row["copy_s"]
        assert row["flops_ratio"] > 1
    assert list(columns("ttft", rows)) == [
        "context", "full", "copy", "relay", "floor", "full/copy", "full/relay", "FLOPs ratio",
    ]  # fmt: skip


def test_decoding_is_measured_for_every_length_and_block_size() -> None:
    rows = measure_decode(tiny_engine(), [32, 64], block_tokens=[8, 16], new_tokens=3, **SIZES)
    sizes = [(row["length"], row["block_tokens"]) for row in rows]
    assert sizes == [(32, 8), (32, 16), (64, 8), (64, 16)]
    assert all(row["relay_over_copy"] == row["relay_s"] / row["copy_s"] for row in rows)


def test_the_repetition_guard_does_not_shorten_measurements() -> None:
    engine, new_tokens = repeating_engine(), TEXT_TOKENS + 2
    prompt = random_prompt(16, 16, 4, 512)
    assert engine.generate(prompt, max_new_tokens=new_tokens).finish_reason == "repetition"
    (row,) = measure_decode(engine, [16], block_tokens=[16], new_tokens=new_tokens, **SIZES)
    assert row["full_s"] > 0


def test_an_answer_that_ends_early_is_an_error() -> None:
    engine = tiny_engine()
    engine.model.hf_model.generation_config.eos_token_id = list(range(512))
    with pytest.raises(ValueError, match="Found an answer of 1 tokens, expected 3"):
        measure_decode(engine, [32], block_tokens=[16], new_tokens=3, repeats=1)


def test_batches_are_measured_unless_the_model_answers_one_by_one() -> None:
    engine = tiny_engine()
    rows = measure_batch(engine, [1, 3], length=32, block_tokens=16, **SIZES)
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["full_over_relay"] == row["full_s"] / row["relay_s"] for row in rows)
    engine.model.hf_model.generation_config.repetition_penalty = 1.05
    with pytest.raises(ValueError, match="does not support batches"):
        measure_batch(engine, [2])


def test_peak_memory_is_the_maximum_allocated_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        first = torch.zeros(256 << 10, dtype=torch.uint8)
        second = torch.zeros(512 << 10, dtype=torch.uint8)
        del first, second
        torch.zeros(600 << 10, dtype=torch.uint8)

    assert 768 << 10 <= peak_bytes(work, torch.device("cpu")) < 780 << 10
    assert capfd.readouterr().err == ""


def test_memory_of_stored_blocks_is_counted() -> None:
    engine = tiny_engine()
    (row,) = measure_memory(engine, [64], block_tokens=16, question_tokens=4, new_tokens=2)
    assert row["stored_bytes"] == 64 * engine.model.bytes_per_token
    assert row["relay_over_copy"] == row["relay_peak_bytes"] / row["copy_peak_bytes"]


def test_shared_prompts_are_compared_with_the_limit_in_the_paper() -> None:
    rows = measure_shared(
        tiny_engine(), [1, 4], system_tokens=[32], context_tokens=8, new_tokens=3, **SIZES
    )
    assert [(row["system_tokens"], row["batch"]) for row in rows] == [(32, 1), (32, 4)]
    for row in rows:
        assert row["gain"] == row["shared_tokens_per_s"] / row["unshared_tokens_per_s"]
        assert row["decode_gain"] > 0
    # 4 requests of 32 + 8 tokens read 160 tokens separately, and 32 + 4 * 8 = 64 together.
    assert [row["bytes_ratio"] for row in rows] == [1.0, 2.5]
    assert columns("shared", rows)["equation 10"] == ["1.0", "2.5"]


def test_recomputation_is_measured_for_each_share() -> None:
    rows = measure_recompute(tiny_engine(), [32, 48], shares=[0, 0.5], block_tokens=16, **SIZES)
    assert [row["length"] for row in rows] == [32, 48]
    assert all(ratio > 0 for row in rows for ratio in row["over_full"].values())
    assert list(columns("recompute", rows)) == ["context", "0%", "50%"]


def test_windows_are_compared_with_a_model_without_windows() -> None:
    windowed = tiny_engine(window=16)
    assert {kind.window for kind in windowed.model.profile.kinds} == {16}
    (row,) = measure_windows(tiny_engine(), windowed, [48], block_tokens=16, **SIZES)
    ratios = [row[f"{name}_full_s"] / row[f"{name}_relay_s"] for name in ("windowed", "plain")]
    assert row["windowed_over_plain"] == pytest.approx(ratios[0] / ratios[1])
    table = columns("windows", [row])
    assert next(iter(table)) == "context"
    assert list(table)[-1] == "quotient"


def test_first_tokens_are_measured_for_each_number_of_passages() -> None:
    engine = tiny_engine(kind="latent")
    assert engine.model.supports_relay
    rows = measure_passages(engine, [48], passages=[1, 3], head_tokens=4, **SIZES)
    assert [row["passages"] for row in rows] == [1, 3]
    for row in rows:
        assert row["full_over_block"] == row["full_s"] / row["block_s"]
        assert row["full_over_copy"] == row["full_s"] / row["copy_s"]
        # Two layers with a latent of 32 values and a rotary key of 4 values, in float32.
        assert row["bytes_per_token"] == 2 * (32 + 4) * 4
    assert columns("passages", rows)["passages"] == ["1", "3"]


def test_hybrid_models_start_from_the_state_of_the_head() -> None:
    engine = tiny_engine(kind="hybrid")
    assert engine.model.profile.has_states
    (row,) = measure_passages(engine, [48], passages=[3], head_tokens=4, **SIZES)
    assert "copy_s" not in row
    assert list(columns("passages", [row]))[2:4] == ["full", "block"]


@pytest.mark.parametrize("measured", ["batch", "ingest", "memory"])
def test_the_command_prints_one_json_object(
    measured: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(BENCHMARKS / "efficiency.py"))["main"]
    main(measured, "32", model="tiny", block_tokens=None, batch_sizes="1", repeats=1)
    data = json.loads(capsys.readouterr().out)
    assert data["model"] == "tiny"
    assert len(data["rows"]) == 1
    assert "torch" in data["machine"]["versions"]
    assert columns(measured, data["rows"])
