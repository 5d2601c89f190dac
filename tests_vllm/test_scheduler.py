"""The scheduler side of the connector: promised tokens, the end of requests, and counters."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.prompts.blocks import STORED
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.keys import is_salt, salt
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.vllm.metrics import Counters, Ended, WorkerReport
from blockattn_rag.server.vllm.scheduler import UNSAVED, SchedulerSide
from blockattn_rag.store import TierStats
from tests_vllm.engines import sampling_of
from tests_vllm.reference import Reference

ENCODE = BlockPlan("encode", (5,), keep=(STORED,)).to_dict()
COMPLETE = BlockPlan("complete", (2, 2), keep=(STORED,) * 2).to_dict()


def step_of(**scheduled: int) -> Any:
    """Return a scheduler step that computes these numbers of tokens for requests."""
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()),
        num_scheduled_tokens=scheduled,
        preempted_req_ids=None,
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: ([3, 4], [0, 5])),
    )


NOTHING = step_of()


def scheduler_of(reference: Reference, **options: Any) -> SchedulerSide:
    return SchedulerSide(ServingConfig.parse(reference.options(**options)), reference.profile)


def request_of(params: dict[str, Any], **more: Any) -> Request:
    return Request("r", [5, 6, 7, 8, 9], sampling_of(params), None, **more)


@pytest.mark.parametrize(
    ("status", "is_saved"),
    [
        (RequestStatus.FINISHED_LENGTH_CAPPED, True),
        (RequestStatus.FINISHED_STOPPED, True),
        (RequestStatus.FINISHED_ABORTED, False),
        (RequestStatus.FINISHED_ERROR, False),
    ],
)
def test_only_complete_requests_are_saved(
    reference: Reference, status: RequestStatus, is_saved: bool
) -> None:
    scheduler = scheduler_of(reference)
    request = request_of(ENCODE)
    scheduler.add(request)
    request.status = status
    assert scheduler.finished(request) is None
    saves = scheduler.orders(NOTHING).saves
    assert [save.token_ids for save in saves] == [[5, 6, 7, 8, 9]] * is_saved


def test_each_chunk_of_a_block_is_copied(reference: Reference) -> None:
    scheduler = scheduler_of(reference)
    request = request_of(ENCODE)
    scheduler.add(request)
    assert request.skip_reading_prefix_cache  # pages outside of the window are not cached
    copied = []
    for computed, scheduled in ((0, 2), (2, 0), (2, 3), (5, 1), (0, 4), (4, 1)):
        request.num_computed_tokens = computed
        copied += scheduler.orders(step_of(r=scheduled, other=1)).copies
    assert [copy.tokens for copy in copied] == [
        *(range(2), range(2, 5)),  # the generated token is not part of the block
        *(range(4), range(4, 5)),  # again after a preemption
    ]
    assert copied[0].pages == ([3, 4], [0, 5])
    scheduler.finished(request)
    assert scheduler.orders(step_of(r=1)).copies == []


@pytest.mark.parametrize(
    ("params", "options", "more"),
    [
        (ENCODE, {"read_only": True}, {}),
        (ENCODE, {}, {"lora_request": LoRARequest("a", 1, "/a")}),
        (COMPLETE, {}, {"lora_request": LoRARequest("b", 2, "/b")}),
        (COMPLETE, {}, {"mm_features": [SimpleNamespace()]}),
        (COMPLETE, {}, {"resumable": True}),
        (BlockPlan("encode", (4,), keep=(STORED,)).to_dict(), {}, {}),
    ],
)
def test_unsupported_requests_fail_through_a_failing_load(
    reference: Reference, params: dict[str, Any], options: dict[str, Any], more: dict[str, Any]
) -> None:
    scheduler = scheduler_of(reference, **options)
    request, pages = request_of(params, **more), SimpleNamespace(get_block_ids=lambda: ([3, 4],))
    scheduler.add(request)
    assert scheduler.promised(request, 0) == (1, True)
    scheduler.allocated(request, pages, 1)  # type: ignore[arg-type]
    assert scheduler.orders(NOTHING).refused == ["r"]
    request.status = RequestStatus.FINISHED_ERROR
    assert scheduler.finished(request) is None


def test_a_refused_request_is_forgotten(reference: Reference) -> None:
    scheduler = scheduler_of(reference)
    request = request_of({**COMPLETE, UNSAVED: "any"})
    scheduler.add(request)
    assert scheduler.promised(request, 0) == (1, True)  # refused
    request.status = RequestStatus.FINISHED_ERROR
    assert scheduler.finished(request) is None
    assert scheduler.promised(request, 0) == (0, False)


def recomputing(reference: Reference, ranks: int = 1) -> SchedulerSide:
    config = ServingConfig.parse(reference.options())
    recipe = RecipeOutline("none", recompute=0.5)
    return SchedulerSide(config, replace(reference.profile, recipe=recipe), ranks)


def test_requests_with_recomputed_tokens_share_no_pages(reference: Reference) -> None:
    scheduler = recomputing(reference)
    requests = [request_of(COMPLETE, cache_salt="own") for _ in range(2)]
    salts = []
    for request in requests:
        scheduler.add(request)
        salts.append(request.cache_salt)
    shared = salt(BlockPlan("complete", (2, 2), keep=(STORED,) * 2), reference.profile, "own")
    assert len({*salts, shared}) == 3
    assert all(map(is_salt, salts))
    step: Any = SimpleNamespace(total_num_scheduled_tokens=0, preempted_req_ids={"r"})
    scheduler.orders(step)
    assert requests[1].cache_salt not in salts  # it must not find its own recomputed pages
    assert is_salt(requests[1].cache_salt)


def test_tokens_are_recomputed_once_all_ranks_have_loaded(reference: Reference) -> None:
    scheduler = recomputing(reference, ranks=2)
    scheduler.add(request_of(COMPLETE))

    def ordered(ended: dict[str, Ended]) -> dict[str, bool]:
        report: Any = SimpleNamespace(kv_connector_worker_meta=WorkerReport(ended=ended))
        scheduler.take(report)
        return scheduler.orders(NOTHING).ended

    assert ordered({"r": Ended(1, 0)}) == {}
    assert ordered({"r": Ended(1, 0)}) == {"r": True}
    assert ordered({"r": Ended(1, 1)}) == {}
    assert ordered({"r": Ended(1, 0)}) == {"r": False}  # blocks are missing on one rank
    assert ordered({"aborted": Ended(2, 0)}) == {"aborted": False}
    both = WorkerReport(ended={"r": Ended(1, 0)}).aggregate(WorkerReport(ended={"r": Ended(1, 1)}))
    assert both.ended == {"r": Ended(2, 1)}


def test_loads_are_counted_by_tier() -> None:
    names = ("memory", "disk", "cache", "home")
    before = [TierStats(name, hits=place) for place, name in enumerate(names)]
    now = [TierStats(name, hits=5, misses=place) for place, name in enumerate(names)]
    counters = Counters()
    counters.count_tiers(before, now, names)
    taken = counters.taken()
    assert taken is not None
    hits = {f"tier_hits/{name}": 5 - place for place, name in enumerate(names)}
    assert taken.data == hits | {f"tier_misses/{name}": n for n, name in enumerate(names) if n}
