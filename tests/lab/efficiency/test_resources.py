"""Rates of encoding, and peak memory of a request."""

from __future__ import annotations

import pytest
import torch

from blockattn_rag.lab.efficiency import measure_ingest
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


def test_the_measurement_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    peak_bytes(lambda: torch.zeros(KIB), torch.device("cpu"))
    assert capfd.readouterr().err == ""


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
