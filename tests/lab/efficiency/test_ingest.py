from __future__ import annotations

import pytest

from blockattn_rag.lab.efficiency import measure_ingest
from blockattn_rag.lab.efficiency.ingest import _plain_rows, _requests
from tests.lab.efficiency.engines import tiny_engine


def test_every_block_size_has_a_row_with_both_rates() -> None:
    model = tiny_engine().model
    rows = measure_ingest(model, [4, 16], total_tokens=64, repeats=1)
    assert [row["block_tokens"] for row in rows] == [4, 16]
    for row in rows:
        ratio = row["encode_tokens_per_s"] / row["plain_tokens_per_s"]
        assert row["encode_over_plain"] == ratio
        # Two layers, keys and values, two heads of eight, four bytes each.
        assert row["bytes_per_token"] == 2 * 2 * 2 * 8 * 4


def test_blocks_vary_around_their_mean_and_plain_rows_hold_the_same_tokens() -> None:
    requests = _requests(tiny_engine().model, 16, 20)
    lengths = [len(request.token_ids) for request in requests]
    assert 8 <= min(lengths) < max(lengths) <= 24
    plain = _plain_rows(requests, 16)
    assert plain.shape == (sum(lengths) // 16, 16)
    assert plain[0, :8].tolist() == list(requests[0].token_ids[:8])


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        measure_ingest(tiny_engine().model, [0])
