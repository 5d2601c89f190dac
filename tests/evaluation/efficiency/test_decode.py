from __future__ import annotations

import pytest

from blockattn_rag.evaluation.efficiency import measure_decode
from tests.evaluation.efficiency.engines import tiny_engine


def test_every_length_and_block_size_has_a_row() -> None:
    rows = measure_decode(
        tiny_engine(), [32, 64], block_tokens=[8, 16], question_tokens=4, new_tokens=3, repeats=1
    )
    sizes = [(row["length"], row["block_tokens"]) for row in rows]
    assert sizes == [(32, 8), (32, 16), (64, 8), (64, 16)]
    for row in rows:
        assert all(row[f"{path}_s"] > 0 for path in ("full", "copy", "relay"))
        assert row["relay_over_copy"] == row["relay_s"] / row["copy_s"]


def test_an_answer_that_ends_early_is_an_error() -> None:
    engine = tiny_engine()
    every_token = list(range(512))
    engine.model.hf_model.generation_config.eos_token_id = every_token
    with pytest.raises(ValueError, match="ended after 1 of 3 tokens"):
        measure_decode(engine, [32], block_tokens=[16], new_tokens=3, repeats=1)


def test_one_new_token_leaves_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="new_tokens"):
        measure_decode(tiny_engine(), [32], new_tokens=1)
