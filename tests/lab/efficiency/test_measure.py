"""Times of requests on every path, alone and in batches, and peak memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockattn_rag.lab.efficiency import measure_batch, measure_decode, measure_ttft
from blockattn_rag.lab.efficiency.measure import Turns, machine, peak_bytes
from blockattn_rag.lab.efficiency.shapes import check_sizes, random_prompt
from blockattn_rag.model.repetition import TEXT_TOKENS
from tests.lab.efficiency.engines import repeating_engine, tiny_engine


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


@pytest.mark.parametrize("option", ["block_tokens", "question_tokens", "repeats"])
def test_sizes_below_one_are_refused(option: str) -> None:
    sizes: dict[str, Any] = {option: 0}
    with pytest.raises(ValueError, match=option):
        measure_ttft(tiny_engine(), [32], **sizes)
    with pytest.raises(ValueError, match="length"):
        measure_ttft(tiny_engine(), [])


def test_every_length_and_block_size_has_a_row() -> None:
    rows = measure_decode(
        tiny_engine(), [32, 64], block_tokens=[8, 16], question_tokens=4, new_tokens=3, repeats=1
    )
    sizes = [(row["length"], row["block_tokens"]) for row in rows]
    assert sizes == [(32, 8), (32, 16), (64, 8), (64, 16)]
    for row in rows:
        assert all(row[f"{path}_s"] > 0 for path in ("full", "copy", "relay"))
        assert row["relay_over_copy"] == row["relay_s"] / row["copy_s"]


def test_an_answer_that_repeats_itself_is_measured_in_full() -> None:
    engine = repeating_engine()
    new_tokens = TEXT_TOKENS + 2
    prompt = random_prompt(16, 16, 4, 512)
    assert engine.generate(prompt, max_new_tokens=new_tokens).finish_reason == "repetition"
    sizes: dict[str, Any] = {"block_tokens": [16], "question_tokens": 4, "repeats": 1}
    (row,) = measure_decode(engine, [16], **sizes, new_tokens=new_tokens)
    assert row["full_s"] > 0


def test_an_answer_that_ends_early_is_an_error() -> None:
    engine = tiny_engine()
    every_token = list(range(512))
    engine.model.hf_model.generation_config.eos_token_id = every_token
    with pytest.raises(ValueError, match="ended after 1 of 3 tokens"):
        measure_decode(engine, [32], block_tokens=[16], new_tokens=3, repeats=1)


def test_one_new_token_leaves_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="new_tokens"):
        measure_decode(tiny_engine(), [32], new_tokens=1)


def test_every_batch_size_has_a_row_with_all_paths() -> None:
    rows = measure_batch(
        tiny_engine(), [1, 3], length=32, block_tokens=16, question_tokens=4, repeats=1
    )
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert all(row[f"{path}_s"] > 0 for path in ("full", "copy", "relay"))
        assert row["full_over_relay"] == row["full_s"] / row["relay_s"]


@pytest.mark.parametrize("options", [{"batch_sizes": [0]}, {"batch_sizes": [1], "length": 0}])
def test_batches_of_sizes_below_one_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measure_batch(tiny_engine(), **options)


def test_an_engine_that_answers_one_by_one_is_refused() -> None:
    engine = tiny_engine()
    engine.model.hf_model.generation_config.repetition_penalty = 1.05
    with pytest.raises(ValueError, match="does not support batches"):
        measure_batch(engine, [2])


KIB = 1024


def test_the_peak_is_what_is_allocated_at_once() -> None:
    def work() -> None:
        first = torch.zeros(256 * KIB, dtype=torch.uint8)
        second = torch.zeros(512 * KIB, dtype=torch.uint8)
        del first, second
        torch.zeros(600 * KIB, dtype=torch.uint8)

    peak = peak_bytes(work, torch.device("cpu"))
    assert 768 * KIB <= peak < 780 * KIB


def test_the_measurement_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    peak_bytes(lambda: torch.zeros(KIB), torch.device("cpu"))
    assert capfd.readouterr().err == ""


def test_the_warm_up_is_not_counted_and_ways_take_turns() -> None:
    calls: list[str] = []
    times = {"a": iter([100.0, 8.0, 10.0, 3.0]), "b": iter([100.0, 1.0, 5.0, 2.0])}

    def way(name: str) -> float:
        calls.append(name)
        return next(times[name])

    steps: list[tuple[int, int]] = []
    turns = Turns(3, 1, lambda done, total: steps.append((done, total)))
    found = turns.measure({"a": lambda: way("a"), "b": lambda: way("b")})
    assert found == {
        "a_s": 8.0, "a_min_s": 3.0, "a_max_s": 10.0, "b_s": 2.0, "b_min_s": 1.0, "b_max_s": 5.0,
    }  # fmt: skip
    assert calls == ["a", "b"] * 4
    assert steps == [(i, 8) for i in range(1, 9)]


def test_progress_goes_on_over_rounds() -> None:
    steps: list[tuple[int, int]] = []
    turns = Turns(1, 2, lambda done, total: steps.append((done, total)))
    for _ in range(2):
        turns.measure({"a": lambda: 1.0})
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_fields_are_named_by_way_and_unit() -> None:
    assert Turns(1, 1).measure({"full": lambda: 2.0}, "mb") == {
        "full_mb": 2.0,
        "full_min_mb": 2.0,
        "full_max_mb": 2.0,
    }


def test_sizes_below_one_are_refused_by_name() -> None:
    check_sizes(repeats=1)
    with pytest.raises(ValueError, match="repeats must be at least 1, found 0"):
        Turns(0, 1)


def test_the_machine_is_described() -> None:
    found = machine()
    assert {"torch", "transformers"} <= set(found["versions"])
    assert found["processor"]
    assert found["threads"] >= 1
