"""A request whose blocks were lost is retried once, if it has sent no token yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import RetryableRequestError

from blockattn_rag.errors import GrammarError, ProtocolError
from blockattn_rag.server.plan import BlockPlan, ServedBlocks
from blockattn_rag.server.vllm.answers import Ticket
from blockattn_rag.server.vllm.metrics import CUT_ANSWERS, RETRIES
from blockattn_rag.server.vllm.retrying import CURRENT, RetryingClient
from tests_vllm.engines import sampling_of

PLAN = BlockPlan("complete", (4, 5))
SERVED = ServedBlocks(blocks=2, loaded_tokens=9, local_tokens=0)


def output(
    finish_reason: str | None = None,
    marker: dict[str, Any] | None = None,
    *,
    stop_reason: str | int | None = None,
    cached: int = 9,
    finished: bool | None = None,
) -> Any:
    return SimpleNamespace(
        outputs=[SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)],
        finished=finish_reason is not None if finished is None else finished,
        kv_transfer_params=marker,
        num_cached_tokens=cached,
    )


TOKEN, LOST = output(), output("error")


def end(served: ServedBlocks | None = SERVED) -> Any:
    return output("stop", served and served.to_dict())


class Client:
    """Engine client that returns prepared outputs for each attempt."""

    def __init__(self, *tries: Sequence[Any]) -> None:
        self.tries = list(tries)
        self.ids: list[str] = []

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
        self.ids.append(request_id)
        for output in self.tries.pop(0):
            yield output


def asked(client: Client, ticket: Ticket | None) -> list[Any]:
    async def ask() -> list[Any]:
        CURRENT.set(ticket)
        outputs = RetryingClient(client).generate([1], sampling_of(None), "r")
        return [output async for output in outputs]

    return asyncio.run(ask())


async def _one_encoded() -> dict[str, int]:
    return {"a": 7}


def test_lost_blocks_are_encoded_and_the_request_is_retried() -> None:
    client = Client([LOST], [TOKEN, end()])
    ticket = Ticket(PLAN, _one_encoded)
    asked(client, ticket)
    assert client.ids == ["r", "r-again"]
    assert ticket.served == replace(SERVED, encoded=1, encoded_tokens=7)


def test_a_block_that_was_encoded_twice_counts_once() -> None:
    ticket = Ticket(PLAN, _one_encoded, {"a": 7, "b": 2})
    asked(Client([LOST], [end()]), ticket)
    assert ticket.served == replace(SERVED, encoded=2, encoded_tokens=9)


def test_retries_and_answers_ended_by_stop_strings_are_counted() -> None:
    before = [counter._value.get() for counter in (RETRIES, CUT_ANSWERS)]
    asked(Client([TOKEN, end()]), Ticket(PLAN, _one_encoded))
    asked(Client([LOST], [TOKEN, end()]), Ticket(PLAN, _one_encoded))
    asked(Client([TOKEN, output("stop", stop_reason="\n")]), Ticket(PLAN, _one_encoded))
    now = [counter._value.get() for counter in (RETRIES, CUT_ANSWERS)]
    assert [new - old for new, old in zip(now, before, strict=True)] == [1, 1]


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        ({"a": 7}, "1 of its 2 blocks were missing or damaged in the store and were"),
        ({}, "all its 2 blocks were intact in the store, so the workers cannot read them"),
    ],
)
def test_a_second_failure_is_final(encoded: dict[str, int], message: str) -> None:
    async def ensure_again() -> dict[str, int]:
        return encoded

    client = Client([LOST], [LOST])
    with pytest.raises(RetryableRequestError, match=f"could not be loaded, .* {message}"):
        asked(client, Ticket(PLAN, ensure_again, {"b": 2}))
    assert len(client.ids) == 2


def test_errors_after_the_first_token_are_passed_on() -> None:
    client = Client([TOKEN, LOST])
    assert asked(client, Ticket(PLAN, _one_encoded))[-1] is LOST
    assert client.ids == ["r"]


@pytest.mark.parametrize(
    "ending",
    [
        end(None),
        output("stop", stop_reason="\n", cached=8),  # some blocks were computed
        output("stop", stop_reason=2),  # a stop token, which the engine detects
    ],
)
def test_an_answer_without_a_report_on_its_blocks_is_an_error(ending: Any) -> None:
    with pytest.raises(ProtocolError, match="sent no reuse report"):
        asked(Client([ending]), Ticket(PLAN, _one_encoded))


def test_answers_ended_by_a_stop_string_have_a_report() -> None:
    ticket = Ticket(PLAN, _one_encoded)
    asked(Client([LOST], [TOKEN, output("stop", stop_reason="\n")]), ticket)
    expected = ServedBlocks(2, 0, 0, encoded=1, encoded_tokens=7, cut_short=True)
    assert ticket.served == expected


def test_the_report_comes_from_the_last_of_several_answers() -> None:
    ticket = Ticket(PLAN, _one_encoded)
    asked(Client([output("stop", finished=False), end()]), ticket)
    assert ticket.served == SERVED


def test_a_failed_grammar_is_reported_and_not_retried() -> None:
    failed = output("error", {"blockattn": {"grammar_failure": "row has 2001 items"}})
    ended = output("stop", failed.kv_transfer_params)
    for outputs in ([failed], [ended], [TOKEN, failed]):
        for ticket in (Ticket(PLAN, _one_encoded), None):
            client = Client(outputs)
            with pytest.raises(
                GrammarError, match="cannot be constrained by its grammar: row has 2001 items"
            ):
                asked(client, ticket)
            assert client.ids == ["r"]


def test_requests_in_full_mode_are_not_retried() -> None:
    client = Client([LOST])
    assert asked(client, None) == [LOST]


def test_recomputed_tokens_of_encoded_blocks_count_once() -> None:
    ending = end(ServedBlocks(3, 9, 0, recomputed=[0, 3, 4]))
    ticket = Ticket(PLAN, _one_encoded, {"b": 5}, ["a", "b", "c"])
    asked(Client([ending]), ticket)
    assert ticket.served is not None
    assert ticket.served.recomputed == [0, 0, 4]
