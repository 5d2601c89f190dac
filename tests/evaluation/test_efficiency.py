from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from blockattn_rag.engine import BlockAttentionEngine
from blockattn_rag.evaluation import efficiency
from blockattn_rag.evaluation.efficiency import machine, measure_ttft
from blockattn_rag.evaluation.shapes import (
    SHAPES,
    counting_tokenizer,
    prefill_flops,
    random_llama,
    random_prompt,
    random_text,
)


def tiny_engine(max_tokens: int = 256) -> BlockAttentionEngine:
    model = random_llama("tiny", max_tokens=max_tokens, device="cpu")
    return BlockAttentionEngine.from_pretrained(model, tokenizer=counting_tokenizer(512))


def test_words_of_the_counting_tokenizer_are_tokens() -> None:
    tokenizer = counting_tokenizer(512)
    text = random_text(20, 512, random.Random(0))
    ids = tokenizer(text)["input_ids"]
    assert [f"t{i}" for i in ids] == text.split()
    assert 0 not in ids


def test_a_random_prompt_has_exactly_the_asked_for_tokens() -> None:
    prompt = random_prompt(100, 32, 7, 512)
    assert [len(block.text.split()) for block in prompt.context] == [32, 32, 32, 4]
    assert len(prompt.final.split()) == 7
    assert prompt == random_prompt(100, 32, 7, 512)


def test_rows_hold_medians_spreads_ratios_and_operations() -> None:
    steps: list[tuple[int, int]] = []
    rows = measure_ttft(
        tiny_engine(),
        [32, 64],
        block_tokens=16,
        question_tokens=8,
        repeats=2,
        on_progress=lambda done, total: steps.append((done, total)),
    )
    assert [(row["length"], row["blocks"]) for row in rows] == [(32, 2), (64, 4)]
    assert steps == [(i, 24) for i in range(1, 25)]
    for row in rows:
        for path in ("full", "copy", "relay", "floor"):
            assert 0 < row[f"{path}_min_s"] <= row[f"{path}_s"] <= row[f"{path}_max_s"]
        assert row["full_over_copy"] == row["full_s"] / row["copy_s"]
        assert row["relay_over_floor"] == row["relay_s"] / row["floor_s"]
        assert row["flops_ratio"] > 1


def test_the_warm_up_counts_for_nothing_and_paths_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([100.0] * 4 + [8.0, 4.0, 2.0, 1.0] + [10.0, 6.0, 4.0, 3.0])
    monkeypatch.setattr(efficiency, "_ttft", lambda *_: next(times))
    [row] = measure_ttft(tiny_engine(), [32], block_tokens=16, question_tokens=8, repeats=2)
    assert [row[f"{path}_s"] for path in efficiency.PATHS] == [9.0, 5.0, 3.0, 2.0]
    assert (row["full_min_s"], row["full_max_s"]) == (8.0, 10.0)


def test_nothing_is_computed_on_the_copy_path() -> None:
    engine = tiny_engine()
    measure_ttft(engine, [32], block_tokens=16, question_tokens=8, repeats=1)
    prompt = random_prompt(32, 16, 8, 512)
    stats = engine.generate(prompt, max_new_tokens=1, on_miss="error").stats
    assert (stats.hits, stats.misses, stats.computed_tokens) == (2, 0, 8)


@pytest.mark.parametrize("option", ["block_tokens", "question_tokens", "repeats"])
def test_sizes_below_one_are_refused(option: str) -> None:
    sizes: dict[str, Any] = {option: 0}
    with pytest.raises(ValueError, match=option):
        measure_ttft(tiny_engine(), [32], **sizes)
    with pytest.raises(ValueError, match="length"):
        measure_ttft(tiny_engine(), [])


def test_operations_of_an_8b_model_are_those_of_the_papers() -> None:
    config = SimpleNamespace(**SHAPES["8b"])
    full = prefill_flops(config, 32768 + 50)
    block = prefill_flops(config, 50, 32768)
    assert full == pytest.approx(740e12, rel=0.01)
    assert block == pytest.approx(1.56e12, rel=0.01)
    # Block-Attention, table 3: 99.8 % fewer operations at 32K.
    assert 1 - block / full == pytest.approx(0.998, abs=0.0005)


def test_a_prefill_in_two_steps_costs_as_much_as_in_one() -> None:
    config = SimpleNamespace(**SHAPES["tiny"])
    output_layer = 2 * config.hidden_size * config.vocab_size
    parts = prefill_flops(config, 30) + prefill_flops(config, 12, 30) - output_layer
    assert prefill_flops(config, 42) == parts


def test_unknown_shapes_and_types_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown shape '7b'; known: tiny, 135m, 1b, 8b"):
        random_llama("7b", max_tokens=64)
    with pytest.raises(ValueError, match="floating type"):
        random_llama("tiny", max_tokens=64, dtype="int8")


def test_the_machine_is_described() -> None:
    assert {"torch", "transformers"} <= set(machine()["versions"])
