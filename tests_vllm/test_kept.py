"""What the API server takes to be in the workers' memory."""

from __future__ import annotations

import pytest

from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.vllm.kept import KeptBlocks


def test_what_was_not_used_for_the_longest_time_is_dropped_first() -> None:
    kept = KeptBlocks(10)
    kept.add("a", 4)
    kept.add("b", 4)
    assert kept.use("a")
    kept.add("c", 4)
    assert [kept.use(key) for key in "abc"] == [True, False, True]


def test_a_block_that_is_encoded_again_takes_its_room_once() -> None:
    kept = KeptBlocks(10)
    for _ in range(3):
        kept.add("a", 6)
    kept.add("b", 4)
    assert kept.use("a")
    kept.forget("a")
    kept.forget("a")
    kept.add("c", 6)
    assert [kept.use(key) for key in "abc"] == [False, True, True]


def test_a_prompt_that_needs_more_than_there_is_room_is_refused() -> None:
    kept = KeptBlocks(10)
    kept.check_room(10)
    with pytest.raises(ProtocolError, match=r"blocks of 11 tokens .* at most 10 .*private_memory"):
        kept.check_room(11)
