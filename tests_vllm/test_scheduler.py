"""What the scheduler's half promises of requests, and what becomes of them when they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.protocol import BlockPlan
from blockattn_rag.server.vllm.orders import UNSAVED
from blockattn_rag.server.vllm.scheduler import SchedulerSide
from tests_vllm.engines import sampling_of
from tests_vllm.reference import Reference

ENCODE = BlockPlan("encode", (5,)).to_dict()
COMPLETE = BlockPlan("complete", (2, 2)).to_dict()
NOTHING: Any = SimpleNamespace(total_num_scheduled_tokens=0)


class Pages:
    """An engine's pages, of which some are forgotten."""

    def __init__(self) -> None:
        self.forgotten: list[set[int]] = []

    def evict_blocks(self, pages: set[int]) -> None:
        self.forgotten.append(pages)

    def get_block_ids(self) -> tuple[list[int]]:
        """Those of a request."""
        return ([3, 4],)


def scheduler_of(reference: Reference, pages: Any = None, **options: Any) -> SchedulerSide:
    config = ServingConfig.parse(reference.options(**options))
    scheduler = SchedulerSide(config, reference.profile)
    scheduler.bind(Pages() if pages is None else pages)
    return scheduler


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
def test_a_block_is_stored_if_its_request_came_to_its_end(
    reference: Reference, status: RequestStatus, is_saved: bool
) -> None:
    scheduler = scheduler_of(reference)
    request = request_of(ENCODE)
    scheduler.add(request)
    request.status = status
    assert scheduler.finished(request, [3]) == (is_saved, None)
    assert [one.pages for one in scheduler.orders(NOTHING).saves] == [[3]] * is_saved


@pytest.mark.parametrize(
    ("params", "options", "more"),
    [
        (ENCODE, {"read_only": True}, {}),
        (ENCODE, {}, {"lora_request": LoRARequest("a", 1, "/a")}),
        (COMPLETE, {}, {"lora_request": LoRARequest("b", 2, "/b")}),
        (COMPLETE, {}, {"mm_features": [SimpleNamespace()]}),
        (COMPLETE, {}, {"resumable": True}),
        (BlockPlan("encode", (4,)).to_dict(), {}, {}),
    ],
)
def test_what_block_mode_cannot_do_fails_by_a_load_that_never_ends_well(
    reference: Reference, params: dict[str, Any], options: dict[str, Any], more: dict[str, Any]
) -> None:
    scheduler = scheduler_of(reference, **options)
    request, pages = request_of(params, **more), Pages()
    scheduler.add(request)
    assert scheduler.promised(request, 0) == (1, True)
    scheduler.allocated(request, pages, 1)  # type: ignore[arg-type]
    assert scheduler.orders(NOTHING).refused == ["r"]
    request.status = RequestStatus.FINISHED_ERROR
    assert scheduler.finished(request, [3]) == (False, None)


@pytest.mark.parametrize(
    ("load_async", "status", "forgotten"),
    [
        (False, RequestStatus.FINISHED_ABORTED, [{3, 4}]),
        (False, RequestStatus.FINISHED_ERROR, [{3, 4}]),
        (False, RequestStatus.FINISHED_LENGTH_CAPPED, []),
        (True, RequestStatus.FINISHED_ABORTED, []),
    ],
)
def test_pages_that_a_step_may_not_have_filled_are_forgotten(
    reference: Reference, load_async: bool, status: RequestStatus, forgotten: list[set[int]]
) -> None:
    pages: Any = Pages()
    scheduler = scheduler_of(reference, pages, load_async=load_async)
    request = request_of(COMPLETE)
    scheduler.add(request)
    assert scheduler.promised(request, 0) == (4, load_async)
    scheduler.allocated(request, pages, 4)
    request.status = status
    scheduler.finished(request, [3, 4])
    assert pages.forgotten == forgotten


def test_pages_of_a_request_that_made_room_while_they_were_filled_are_forgotten(
    reference: Reference,
) -> None:
    pages: Any = Pages()
    scheduler = scheduler_of(reference, pages)
    news: Any = SimpleNamespace(invalid_block_ids={3, 4}, kv_connector_worker_meta=None)
    scheduler.heard(news)
    assert pages.forgotten == [{3, 4}]


def test_a_refused_request_that_asks_for_failed_saves_is_forgotten_when_it_ends(
    reference: Reference,
) -> None:
    scheduler = scheduler_of(reference)
    request = request_of({**COMPLETE, UNSAVED: "any"})
    scheduler.add(request)
    assert scheduler.promised(request, 0) == (1, True)  # it is refused
    request.status = RequestStatus.FINISHED_ERROR
    assert scheduler.finished(request, [3]) == (False, None)
    assert scheduler.promised(request, 0) == (0, False)
