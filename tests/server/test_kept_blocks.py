"""The API server's estimate of the blocks in the memory of the workers."""

from __future__ import annotations

import pytest

from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.vllm.kept_blocks import KeptBlocks


def test_the_least_recently_used_block_is_evicted_first() -> None:
    kept = KeptBlocks(10)
    kept.add("a", 4)
    kept.add("b", 4)
    assert kept.use("a")
    kept.add("c", 4)
    assert [kept.use(key) for key in "abc"] == [True, False, True]


def test_a_block_that_is_encoded_twice_counts_once() -> None:
    kept = KeptBlocks(10)
    for _ in range(3):
        kept.add("a", 6)
    kept.add("b", 4)
    assert kept.use("a")
    kept.discard("a")
    kept.discard("a")
    kept.add("c", 6)
    assert [kept.use(key) for key in "abc"] == [False, True, True]


def test_a_prompt_larger_than_the_memory_is_refused() -> None:
    kept = KeptBlocks(10)
    kept.check_room(10)
    with pytest.raises(ProtocolError, match=r"has 11 tokens .* at most 10 .*private_memory"):
        kept.check_room(11)
