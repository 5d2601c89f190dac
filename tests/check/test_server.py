"""``check_server`` asks one question in both modes and detects wrong answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from blockattn_rag import ServerClient
from blockattn_rag.check.server import PASSAGES, ServerReport, check_server
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import ServingError
from tests.engines import tuned_model
from tests.fake_server import CHATS, FakeServer, RefusalError

ROWS = [
    "full mode answers",
    "passages are stored",
    "block mode answers",
    "passages are reused",
    "the answer is the same again",
    "passages are reused in any order",
]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(tuned_model()).listening() as fake:
        yield fake


def checked(server: FakeServer) -> ServerReport:
    return check_server(ServerClient(server.url, retries=0))


def failed(report: ServerReport) -> list[str]:
    return [row.name for row in report.rows if not row.passed]


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("head:4", promote=1)])
def test_a_correct_server_passes(recipe: Recipe) -> None:
    with FakeServer(tuned_model(), recipe=recipe).listening() as server:
        report = checked(server)
        keys = {*server.engine.store.keys()}
        again = checked(server)
    assert failed(report) == []
    assert [row.name for row in report.rows] == ROWS
    assert report.block
    assert report.full
    assert (report.model, report.info.to_dict()) == (server.url, server.info)
    assert (again.block, again.full) == (report.block, report.full)
    assert {*server.engine.store.keys()} == keys
    assert 0 < len(keys) <= len(PASSAGES) + 1


@pytest.mark.parametrize(
    ("report", "names"),
    [
        ({"mode": "full"}, [ROWS[2], ROWS[3], ROWS[5]]),
        ({"misses": 2}, [ROWS[3], ROWS[5]]),
        ({"hits": 0, "misses": 0}, [ROWS[2], ROWS[3], ROWS[5]]),
        ({"mode": "block"}, [ROWS[0]]),
    ],
)
def test_a_server_that_reports_another_mode_or_no_reuse_fails(
    server: FakeServer, report: dict[str, Any], names: list[str]
) -> None:
    server.report = report
    assert failed(checked(server)) == names


def test_differing_answers_to_the_same_prompt_fail(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = server.generation

    def numbered(path: str, fields: Any) -> Any:
        answer, report = generation(path, fields)
        return replace(answer, text=f"Answer {len(server.bodies(CHATS))}"), report

    monkeypatch.setattr(server, "generation", numbered)
    assert failed(checked(server)) == ["the answer is the same again"]


def test_a_read_only_server_without_the_passages_is_checked_in_full_mode() -> None:
    with FakeServer(tuned_model(), read_only=True).listening() as server:
        report = checked(server)
    assert failed(report) == []
    assert [row.name for row in report.rows] == ["full mode answers", "passages are not stored"]
    assert report.block is None


def test_a_writable_server_that_stores_nothing_fails(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> Any:
        raise RefusalError(409, "not stored")

    monkeypatch.setattr(server, "encode", refuse)
    assert failed(checked(server)) == ["passages are not stored"]


def test_server_errors_are_raised(server: FakeServer) -> None:
    server.faults.append(RefusalError(404, "no"))
    with pytest.raises(ServingError, match="this package's connector and endpoints"):
        checked(server)
    server.faults.append(RefusalError(500, "broken"))
    with pytest.raises(ServingError, match="returned status 500: broken"):
        checked(server)
