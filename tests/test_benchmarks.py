"""What benchmarks of servers make of what they measured."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import serving_faults
import serving_load
import serving_tenants
import serving_trace
from serving_load import Answer


def test_popular_passages_are_drawn_more_often_and_stand_anywhere() -> None:
    drawn = np.array(serving_trace.drawn(100, 2000, 5, exponent=1.0))
    assert all(len(set(ranks)) == 5 for ranks in drawn.tolist())
    often = np.bincount(drawn.flatten(), minlength=100)
    assert often[0] > 2 * often[9] > 2 * often[99] > 0
    places = np.argwhere(drawn == 0)[:, 1]
    assert np.bincount(places).min() > 0.8 * len(places) / 5


def test_a_gap_counts_as_disturbed_while_another_request_waits_for_its_first_token() -> None:
    running = Answer(0.0, [1.0, 2.0, 3.0, 5.0, 6.0])
    other = Answer(3.5, [4.5])
    assert serving_load.gaps([running, other]) == ([1.0, 1.0, 1.0], [2.0])
    assert serving_load.gaps([running]) == ([1.0, 1.0, 2.0, 1.0], [])


@pytest.mark.parametrize("happened", [np.zeros(8, bool), np.ones(8, bool)])
def test_an_event_that_never_or_always_happened_gets_no_figures(happened: Any) -> None:
    with pytest.raises(ValueError, match="ask more questions"):
        serving_tenants.interval(np.zeros(8), happened)


def seen(*waits_s: float, cached: int) -> serving_trace.Seen:
    """One round of answers of two tokens each, one after the other, to prompts of 100 tokens."""
    found = serving_trace.Seen()
    starts = np.cumsum([0.0, *(wait + 1.0 for wait in waits_s[:-1])])
    times = [
        [start + wait, start + wait + 0.5] for start, wait in zip(starts, waits_s, strict=True)
    ]
    found.rounds = [
        [
            Answer(start, two, [1, 2], prompt_tokens=100, cached_tokens=cached)
            for start, two in zip(starts, times, strict=True)
        ]
    ]
    found.seconds = float(sum(waits_s) + len(waits_s))
    return found


def test_systems_are_compared_question_by_question() -> None:
    both = {"prefix": seen(6.0, 8.0, 3.0, cached=10), "memory": seen(1.0, 2.0, 1.0, cached=90)}
    told = serving_trace.row("prefix", both, clients=1)
    assert told["ttft_median_s"] == pytest.approx(6.0)
    assert told["calm_gap_median_s"] == pytest.approx(0.5)
    assert told["disturbed_gap_mean_s"] is None
    assert told["tokens_per_s"] == pytest.approx(6 / 20)
    assert told["hit_share"] == pytest.approx(0.1)
    assert told["slower"] == pytest.approx(4.0)  # of 6, 4 and 3 times
    assert told["same_tokens"] == 1.0
    line = serving_trace.table([told]).splitlines()[-1]
    assert "| 6,000 ms |" in line
    assert "| 4.0 (3.0 to 6.0) | 100% |" in line


def streamed(*lines: str, status: int = 200) -> httpx.AsyncClient:
    async def content() -> AsyncIterator[bytes]:
        for line in lines:
            yield f"{line}\n\n".encode()

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=content())

    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


def event(**fields: Any) -> str:
    return f"data: {json.dumps({'choices': [], **fields})}"


def test_an_answer_is_read_from_its_stream() -> None:
    http = streamed(
        event(choices=[{"token_ids": [5]}]),
        ": a comment",
        event(choices=[{"token_ids": [6, 7]}], kv_transfer_params={"blockattn": {}}),
        event(usage={"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}),
        "data: [DONE]",
    )
    answer = asyncio.run(serving_load.ask(http, "http://server", {}))
    assert (answer.tokens, len(answer.times_s)) == ([5, 6, 7], 3)
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)
    assert answer.told == {"blockattn": {}}


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        ('{"error": {"message": "no block"}}', 503, "503: no block"),
        ("something went wrong", 500, "500: something went wrong"),
        (event(error={"message": "lost"}), 200, "a stream: lost"),
    ],
)
def test_a_failure_is_told_with_its_reason(line: str, status: int, reason: str) -> None:
    with pytest.raises(serving_load.FailedAnswerError) as failed:
        asyncio.run(serving_load.ask(streamed(line, status=status), "http://server", {}))
    assert str(failed.value).strip() == reason


def phase(**changed: Any) -> dict[str, Any]:
    outcomes = Counter({"right": 5, "failed": 2, "left early": 1, "server killed": 3})
    reasons = Counter({"503: the store does not answer": 2})
    return {"outcomes": outcomes, "reasons": reasons, "left": {"pages": 0.0}} | changed


def test_a_campaign_fails_by_what_must_not_be() -> None:
    assert not serving_faults.is_bad(phase())
    for outcome in ("wrong", "stuck", "broken off"):
        assert serving_faults.is_bad(phase(outcomes=Counter({outcome: 1})))
    assert serving_faults.is_bad(phase(reasons=Counter({"500: Internal server error": 1})))
    assert serving_faults.is_bad(phase(left={"pages": 0.1}))


def test_reasons_are_counted_without_their_ids() -> None:
    reason = "block 3 of request cmpl-0123456789abcdef01 in kv/ae/ took 5.25 s"
    assert serving_faults.without_names(reason) == "block # of request cmpl-# in kv/#/ took # s"


@pytest.mark.parametrize(
    ("owner", "faster", "same", "expected"),
    [
        ("B", (0.45, 0.55), True, True),
        ("B", (0.45, 0.55), False, False),
        ("B", (0.51, 0.6), True, False),
        ("B", (0.4, 0.49), True, False),
        ("A", (0.9, 1.0), True, True),
        ("A", (0.4, 0.6), False, True),
        ("A", (0.4, 0.6), True, False),  # a test that sees nothing proves nothing
    ],
)
def test_tenants_are_apart_if_the_test_could_tell(
    owner: str, faster: tuple[float, float], same: bool, expected: bool
) -> None:
    test = {"owner": owner, "faster_within": faster, "says_the_same": same}
    assert serving_tenants.is_as_it_should(test) is expected
