"""The benchmark that replays a request log."""

from __future__ import annotations

import json
import runpy
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.errors import DataError
from blockattn_rag.lab.planning import Footprint, Machine, prefill_flops, shape_config

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from replay import (
    BlockCache,
    PrefixCache,
    ReplayClock,
    Request,
    Segment,
    read_log,
    replay,
    replay_first,
)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LENGTHS = {"s": 16, "a": 24, "b": 8, "c": 40, "d": 1, "q": 5, "r": 16}
FOOTPRINT = Footprint(weight_bytes=0, bytes_per_token=1)
MACHINE = Machine(1 << 40, 1 << 40, operations_per_s=1e9, device_bytes_per_s=1e15)
CLOCK = ReplayClock(shape_config("tiny"), FOOTPRINT, MACHINE)


def request(ids: str) -> Request:
    kinds = {"s": "system", "q": "question", "r": "question"}
    return tuple(Segment(one, LENGTHS[one], kinds.get(one, "passage")) for one in ids)


def reused(cache: PrefixCache | BlockCache, *prompts: str) -> list[list[int]]:
    return [list(cache.serve(request(ids)).reused) for ids in prompts]


class PagedCache:
    """Reference prefix cache that keys each page by all tokens up to its end."""

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
def test_runs_of_pages_are_equivalent_to_single_pages(prompts: list[str], room: int | None) -> None:
    runs, pages = PrefixCache(room), PagedCache(room)
    for one in map(request, prompts):
        assert sum(runs.serve(one).reused) == pages.serve(one)


def test_reordering_continues_the_longest_cached_prefix() -> None:
    cache = PrefixCache()
    reused(cache, "sabq", "bcaq")
    gains = dict.fromkeys(LENGTHS, 1) | {"d": 3, "r": 2}
    for sent, best in (("dacbq", "bcadq"), ("asdq", "sadq"), ("crdq", "drcq"), ("q", "q")):
        assert cache.reordered(request(sent), gains) == request(best)


def test_blocks_are_reused_everywhere_except_at_the_end() -> None:
    sent = ("sabq", "bcsq", "qa", "bq", "aqb", "aaq")
    expected = [[0, 0, 0, 0], [8, 0, 16, 0], [0, 0], [8, 0], [24, 5, 0], [24, 24, 0]]
    assert reused(BlockCache(FOOTPRINT), *sent) == expected
    # The 40-byte cache has room for a and s only, so adding b evicts what was used least recently.
    evicting = reused(BlockCache(FOOTPRINT, 40), "aq", "sq", "aq", "bq", "sq", "aq")
    assert [hits[0] for hits in evicting] == [0, 0, 24, 0, 0, 0]


REQUESTS = [request(ids) for ids in ("sabq", "sbaq", "sacr")]


def test_a_replay_counts_tokens_bytes_and_times() -> None:
    def flops(new: int, cached: int = 0) -> float:
        return prefill_flops(CLOCK.config, new, cached)

    prefix = replay(REQUESTS, "prefix", CLOCK)
    assert prefix.passage_hits == pytest.approx(16 / 128)  # a page of `a` in the third request
    assert prefix.hits == pytest.approx((16 + 32) / 202)
    times = sorted([flops(53), flops(37, 16), flops(64, 32)])
    assert prefix.ttft_s == pytest.approx(times[1] / 1e9)
    assert replay(REQUESTS, "prefix-sorted", CLOCK).hits > prefix.hits
    blocks = replay(REQUESTS, "blocks", CLOCK)
    assert blocks.passage_hits == pytest.approx((32 + 24) / 128)
    assert blocks.read_bytes == pytest.approx((48 + 40) / 3)
    first = flops(16) + flops(24) + flops(8) + flops(5, 48)
    second, third = flops(5, 48), flops(40) + flops(16, 80)
    assert blocks.ttft_s == pytest.approx(sorted([first, second, third])[1] / 1e9)


def test_blocks_that_exceed_the_memory_are_read_from_disk() -> None:
    machine = Machine(87, 1 << 40, operations_per_s=1e15, device_bytes_per_s=1e15,
                      disk_bytes_per_s=10)  # fmt: skip
    outcome = replay(REQUESTS, "blocks", ReplayClock(CLOCK.config, FOOTPRINT, machine))
    assert outcome.from_disk
    assert outcome.ttft_s == pytest.approx(40 / 10)


def test_the_most_used_passages_of_the_first_half_are_encoded_in_advance() -> None:
    log = [request(ids) for ids in ("abq", "aq", "baq", "caq")]
    sizes = {id_: FOOTPRINT.block_bytes(LENGTHS[id_]) for id_ in "abc"}
    none, some, every = (replay_first(log, share, FOOTPRINT) for share in (0, 1 / 3, 1))
    tokens = 2 * LENGTHS["a"] + LENGTHS["b"] + LENGTHS["c"]
    assert (none.encoded_bytes, none.bounded_hits) == (0, 0)
    assert none.passage_hits == pytest.approx(LENGTHS["a"] / tokens)  # the second use of `a`
    assert some.encoded_bytes == sizes["a"]
    assert some.passage_hits == pytest.approx(2 * LENGTHS["a"] / tokens)
    assert every.passage_hits == every.bounded_hits == 1
    assert none.stored_bytes == every.stored_bytes == sum(sizes.values())


def written(path: Path, *requests: list[dict[str, Any]]) -> Path:
    lines = (json.dumps({"segments": segments}) for segments in requests)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_the_command_replays_a_log_under_all_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passages = [{"id": id_, "tokens": 64, "kind": "passage"} for id_ in "ab"]
    question = {"id": "q", "tokens": 8, "kind": "question"}
    log = written(tmp_path / "log.jsonl", [*passages, question], [*passages[::-1], question])
    runpy.run_path(str(BENCHMARKS / "replay.py"))["main"](log, room=1)
    data = json.loads(capsys.readouterr().out)
    hits = {(one["policy"], one["room_bytes"]): one["passage_hits"] for one in data["outcomes"]}
    shares = {"prefix": 0, "prefix-sorted": 0.5, "blocks": 0.5, "blocks-ingested": 1}
    assert hits == {("full", None): 0} | {
        (policy, room): share for room in (None, 1 << 30) for policy, share in shares.items()
    }


def test_an_id_with_two_lengths_is_refused(tmp_path: Path) -> None:
    segments = [{"id": "a", "tokens": tokens, "kind": "passage"} for tokens in (3, 4)]
    log = written(tmp_path / "log.jsonl", segments[:1], segments[1:])
    with pytest.raises(DataError, match="line 2: found 4 tokens for the id 'a', which had 3"):
        read_log(log)
