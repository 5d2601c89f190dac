from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.errors import DataError
from blockattn_rag.lab.efficiency.shapes import prefill_flops, shape_config
from blockattn_rag.lab.planning import Footprint, Machine
from blockattn_rag.lab.replay import BlockCache, PrefixCache, ReplayClock, plot_rooms, replay
from blockattn_rag.lab.trace import Request, Segment, read_trace

LENGTHS = {"s": 16, "a": 24, "b": 8, "c": 40, "d": 1, "q": 5, "r": 16}
FOOTPRINT = Footprint(weight_bytes=0, bytes_per_token=1)
MACHINE = Machine(1 << 40, 1 << 40, operations_per_s=1e9, device_bytes_per_s=1e15)
CLOCK = ReplayClock(shape_config("tiny"), FOOTPRINT, MACHINE)


def request(ids: str) -> Request:
    kinds = {"s": "system", "q": "question", "r": "question"}
    return tuple(Segment(one, LENGTHS[one], kinds.get(one, "passage")) for one in ids)


def reused(cache: PrefixCache | BlockCache, *prompts: str) -> list[list[int]]:
    return [list(cache.serve(request(ids)).reused) for ids in prompts]


class TestPrefixCache:
    @pytest.mark.parametrize(
        ("prompts", "last"),
        [
            (["saq", "sbq"], [16, 0, 0]),
            (["saq", "saq"], [16, 16, 0]),  # 45 tokens: two full pages
            (["sabq", "sabq"], [16, 24, 8, 0]),  # 53 tokens: three
            (["sabq", "sacq"], [16, 16, 0, 0]),  # the third page ends in another passage
            (["sq", "asq"], [0, 0, 0]),  # not at the beginning
            (["sr", "sr"], [16, 0]),  # 32 tokens: the last one is computed, with its page
            (["ddq", "ddq"], [0, 0, 0]),  # no full page
            (["dcq", "dcq"], [1, 31, 0]),
            (["s", "saq"], [16, 0, 0]),  # a question may become a context
            (["saaq", "saaq"], [16, 24, 24, 0]),
        ],
    )
    def test_full_pages_of_prefixes_are_reused(self, prompts: list[str], last: list[int]) -> None:
        assert reused(PrefixCache(), *prompts)[-1] == last

    def test_the_last_pages_of_the_oldest_request_are_evicted_first(self) -> None:
        # c has 2 pages with its question, s and a and q 2.
        assert reused(PrefixCache(3), "cq", "saq", "cq")[-1] == [16, 0]
        assert reused(PrefixCache(4), "cq", "saq", "cq")[-1] == [32, 0]
        # Used again, c is newer than s.
        found = reused(PrefixCache(4), "saq", "cq", "saq", "aq", "cq")
        assert found[2:] == [[16, 16, 0], [0, 0], [16, 0]]

    def test_no_room_reuses_nothing(self) -> None:
        assert reused(PrefixCache(0), "saq", "saq")[-1] == [0, 0, 0]

    def test_reordering_continues_the_longest_cached_prefix(self) -> None:
        cache = PrefixCache()
        reused(cache, "sabq", "bcaq")
        gains = dict.fromkeys(LENGTHS, 1) | {"d": 3, "r": 2}
        assert cache.reordered(request("dacbq"), gains) == request("bcadq")
        assert cache.reordered(request("asdq"), gains) == request("sadq")
        assert cache.reordered(request("crdq"), gains) == request("drcq")
        assert cache.reordered(request("aadsq"), gains) == request("sadaq")
        assert cache.reordered(request("q"), gains) == request("q")


class PagedCache:
    """A prefix cache that keeps each page, by all tokens up to its end."""

    def __init__(self, room: int | None) -> None:
        self.room = room
        self.pages: OrderedDict[tuple[Any, ...], None] = OrderedDict()

    def serve(self, request: Request) -> int:
        tokens = tuple((segment.id, i) for segment in request for i in range(segment.tokens))
        keys = [tokens[:end] for end in range(16, len(tokens) + 1, 16)]
        hits = next((n for n, key in enumerate(keys) if key not in self.pages), len(keys))
        for key in reversed(keys):
            self.pages[key] = None
            self.pages.move_to_end(key)
        while self.room is not None and len(self.pages) > self.room:
            self.pages.popitem(last=False)
        return 16 * min(hits, (len(tokens) - 1) // 16)


prompts = st.lists(st.text("sabcdqr", min_size=1, max_size=5), min_size=1, max_size=12)


@given(prompts, st.none() | st.integers(0, 9))
def test_runs_of_pages_act_as_the_single_pages_do(prompts: list[str], room: int | None) -> None:
    runs, pages = PrefixCache(room), PagedCache(room)
    for one in map(request, prompts):
        assert sum(runs.serve(one).reused) == pages.serve(one)


@given(st.lists(st.text("sabcd", max_size=5), min_size=1, max_size=12))
def test_blocks_compute_no_more_passage_tokens_than_a_prefix_cache(contexts: list[str]) -> None:
    # Of the question, which is never a block, a prefix cache may reuse something.
    blocks, prefixes = BlockCache(FOOTPRINT), PrefixCache()
    for one in (request(f"{context}q") for context in contexts):
        reused_blocks, reused_prefix = blocks.serve(one).reused, prefixes.serve(one).reused
        assert all(a >= b for a, b in zip(reused_blocks[:-1], reused_prefix[:-1], strict=True))


class TestBlockCache:
    def test_blocks_are_reused_anywhere_but_at_the_end(self) -> None:
        found = reused(BlockCache(FOOTPRINT), "sabq", "bcsq", "qa", "bq", "aqb")
        assert found == [[0, 0, 0, 0], [8, 0, 16, 0], [0, 0], [8, 0], [24, 5, 0]]

    def test_a_block_that_a_request_repeats_is_computed_and_read_once(self) -> None:
        cache = BlockCache(FOOTPRINT)
        assert cache.serve(request("aaq")).reused == [0, 24, 0]
        again = cache.serve(request("aaq"))
        assert (again.reused, again.read_bytes) == ([24, 24, 0], 24)

    def test_the_block_that_was_used_longest_ago_is_evicted(self) -> None:
        # 40 bytes: a and s fit, and b instead of the older one.
        found = reused(BlockCache(FOOTPRINT, 40), "aq", "sq", "aq", "bq", "sq", "aq")
        assert [one[0] for one in found] == [0, 0, 24, 0, 0, 0]
        assert reused(BlockCache(FOOTPRINT, 40), "aq", "sq", "aq", "bq", "aq")[-1] == [24, 0]

    def test_a_block_larger_than_the_room_is_not_kept(self) -> None:
        assert reused(BlockCache(FOOTPRINT, 39), "aq", "cq", "cq", "aq")[2:] == [[0, 0], [24, 0]]

    def test_bytes_of_scales_count(self) -> None:
        cache = BlockCache(Footprint(0, bytes_per_token=2, bytes_per_block=10), 58)
        assert reused(cache, "aq", "aq")[-1] == [24, 0]
        assert cache.serve(request("aq")).read_bytes == 58


REQUESTS = [request(ids) for ids in ("sabq", "sbaq", "sacr")]


def test_a_replay_counts_tokens_bytes_and_times() -> None:
    def flops(new: int, cached: int = 0) -> float:
        return prefill_flops(CLOCK.config, new, cached)

    full = replay(REQUESTS, "full", CLOCK)
    assert (full.passage_hits, full.hits, full.read_bytes) == (0, 0, 0)
    assert full.computed_tokens == pytest.approx((53 + 53 + 96) / 3)
    assert full.ttft_s == pytest.approx(flops(53) / 1e9)
    prefix = replay(REQUESTS, "prefix", CLOCK)
    assert prefix.passage_hits == pytest.approx(16 / 128)  # one page of a in the third request
    assert prefix.hits == pytest.approx((16 + 32) / 202)
    times = sorted([flops(53), flops(37, 16), flops(64, 32)])
    assert prefix.ttft_s == pytest.approx(times[1] / 1e9)
    blocks = replay(REQUESTS, "blocks", CLOCK)
    assert blocks.passage_hits == pytest.approx((32 + 24) / 128)
    assert blocks.hits == pytest.approx((48 + 40) / 202)
    assert blocks.read_bytes == pytest.approx((48 + 40) / 3)
    first = flops(16) + flops(24) + flops(8) + flops(5, 48)
    second, third = flops(5, 48), flops(40) + flops(16, 80)
    assert blocks.ttft_s == pytest.approx(sorted([first, second, third])[1] / 1e9)
    ingested = replay(REQUESTS, "blocks-ingested", CLOCK)
    assert ingested.passage_hits == 1
    assert ingested.hits == pytest.approx((128 + 32) / 202)  # not the first system prompt


def test_the_best_order_makes_a_prefix_cache_reuse_more() -> None:
    assert replay(REQUESTS, "prefix-sorted", CLOCK).hits > replay(REQUESTS, "prefix", CLOCK).hits


def test_a_room_bounds_all_caches() -> None:
    # One page, of s; or the block of s or b, and a and c are too large.
    for policy, hits in (("prefix", 32), ("blocks", 24), ("blocks-ingested", 24)):
        found = replay(REQUESTS, policy, CLOCK, room_bytes=20)  # type: ignore[arg-type]
        assert found.room_bytes == 20
        assert found.hits * 202 == pytest.approx(hits)


def test_blocks_that_exceed_the_memory_are_read_from_disk() -> None:
    machine = Machine(87, 1 << 40, operations_per_s=1e15, device_bytes_per_s=1e15,
                      disk_bytes_per_s=10)  # fmt: skip
    found = replay(REQUESTS, "blocks", ReplayClock(CLOCK.config, FOOTPRINT, machine))
    assert found.from_disk
    assert found.ttft_s == pytest.approx(40 / 10)
    assert not replay(REQUESTS, "blocks", CLOCK).from_disk


def test_a_trace_without_passages_has_no_share_of_them() -> None:
    assert replay([request("sq")], "blocks", CLOCK).passage_hits is None


def test_a_plot_is_written(tmp_path: Path) -> None:
    plot_rooms(REQUESTS, CLOCK, tmp_path / "rooms.svg")
    assert "blocks" in (tmp_path / "rooms.svg").read_text(encoding="utf-8")


SEGMENT = {"id": "a", "tokens": 3, "kind": "passage"}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def test_a_trace_is_read_and_further_fields_are_ignored(tmp_path: Path) -> None:
    question = {"id": "q", "tokens": 1, "kind": "question", "text": "?"}
    lines = ({"segments": [SEGMENT, question], "time": 3}, {"segments": [SEGMENT]})
    first, second = read_trace(written(tmp_path / "trace.jsonl", *lines))
    assert first == (Segment("a", 3, "passage"), Segment("q", 1, "question"))
    assert first[0] is second[0]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (None, "line 2: found 'segments' of null, expected a list"),
        ([], "line 2: found no segment in 'segments', expected at least the question"),
        ([SEGMENT, 7], r"line 2: segments\[1\]: found a segment of a number, expected an object"),
        ([SEGMENT | {"tokens": 0}], "found 0 as 'tokens', expected a whole number above 0"),
        ([SEGMENT | {"kind": ""}], "found an empty 'kind', expected text"),
        ([{"id": "a", "tokens": 3}], "found no 'kind' among the keys"),
        ([SEGMENT | {"tokens": 4}], "found 4 tokens for the id 'a', which had 3 before"),
    ],
)
def test_names_malformed_line(tmp_path: Path, segments: Sequence[Any] | None, message: str) -> None:
    file = written(tmp_path / "trace.jsonl", {"segments": [SEGMENT]}, {"segments": segments})
    with pytest.raises(DataError, match=message):
        read_trace(file)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected one JSON object a line, found no line"):
        read_trace(written(tmp_path / "trace.jsonl"))
