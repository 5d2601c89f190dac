"""Rates of encoding, and peak memory of a request."""

from __future__ import annotations

import pytest
import torch

from blockattn_rag.lab.efficiency import measure_ingest, measure_memory
from blockattn_rag.lab.efficiency.resources import peak_bytes
from tests.lab.efficiency.engines import tiny_engine

KIB = 1024


def test_the_peak_is_what_is_allocated_at_once() -> None:
    def work() -> None:
        first = torch.zeros(256 * KIB, dtype=torch.uint8)
        second = torch.zeros(512 * KIB, dtype=torch.uint8)
        del first, second
        torch.zeros(600 * KIB, dtype=torch.uint8)

    peak = peak_bytes(work, torch.device("cpu"))
    assert 768 * KIB <= peak < 780 * KIB


def test_relay_joins_small_blocks_from_the_second_token_on_and_large_ones_never() -> None:
    engine = tiny_engine(max_tokens=4500)

    def relay(block_tokens: int, new_tokens: int) -> int:
        (row,) = measure_memory(
            engine, [4096], block_tokens=block_tokens, question_tokens=4, new_tokens=new_tokens
        )
        return int(row["relay_peak_bytes"])

    stored = 4096 * engine.model.bytes_per_token
    assert relay(256, 1) < stored
    assert relay(256, 2) > stored
    assert relay(512, 2) < stored


def test_the_measurement_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    peak_bytes(lambda: torch.zeros(KIB), torch.device("cpu"))
    assert capfd.readouterr().err == ""


def test_relay_does_not_grow_with_the_context_and_copy_does() -> None:
    engine = tiny_engine(max_tokens=4500)
    rows = measure_memory(engine, [1024, 4096], block_tokens=512, question_tokens=4, new_tokens=2)
    small, large = rows
    assert [row["stored_bytes"] for row in rows] == [1024 * 256, 4096 * 256]
    # Each of 6 more blocks costs a partial result of the question: 4 tokens, 4 heads of 8, float32;
    # turned queries, parts and their stack are three of it. A token costs its id and its mask, of
    # 8 bytes each, and transformers makes copies of both. For the second token, a layer's scores of
    # all blocks are there at once, for 4 heads: each block's, all of them, and the weights.
    partials, bookkeeping, scores = 6 * 3 * 4 * 4 * (8 + 1) * 4, 3072 * 8 * 8, 3072 * 3 * 4 * 4
    grown = large["relay_peak_bytes"] - small["relay_peak_bytes"]
    assert grown <= partials + bookkeeping + scores
    assert large["copy_peak_bytes"] - small["copy_peak_bytes"] >= 3072 * 256
    assert large["relay_over_copy"] == large["relay_peak_bytes"] / large["copy_peak_bytes"]


def test_every_block_size_has_a_row_with_both_rates() -> None:
    model = tiny_engine().model
    rows = measure_ingest(model, [4, 16], total_tokens=64, repeats=1)
    assert [row["block_tokens"] for row in rows] == [4, 16]
    for row in rows:
        ratio = row["encode_tokens_per_s"] / row["plain_tokens_per_s"]
        assert row["encode_over_plain"] == ratio
        # Two layers, keys and values, two heads of eight, four bytes each.
        assert row["bytes_per_token"] == 2 * 2 * 2 * 8 * 4


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        measure_ingest(tiny_engine().model, [0])
