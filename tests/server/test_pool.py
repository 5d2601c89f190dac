"""``ServerPool`` distributes passages over several servers and records them in a journal."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from blockattn_rag.errors import ServingError
from blockattn_rag.prompts.blocks import handle_of
from blockattn_rag.server import ServerPool, pool
from blockattn_rag.server.protocol import EncodeAnswer, EncodeBody, Outcome, ServerInfo
from tests.server.profiles import SERVER_INFO as INFO

TEXTS = [f"Passage {number}." for number in range(20)]


class StubServer:
    """Server that stores texts in a set, which several servers may share.

    Args:
        before: Called with the number of sent texts before each answer. May block or raise.
    """

    def __init__(
        self,
        name: str,
        store: set[str],
        *,
        info: ServerInfo = INFO,
        before: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.url, self._store, self._info, self._before = name, store, info, before
        self.sent: list[str] = []
        self.is_healthy = True

    @property
    def info(self) -> ServerInfo:
        return self.check()

    def check(self) -> ServerInfo:
        if not self.is_healthy:
            raise ServingError(f"Cannot reach {self.url}")
        return self._info

    def send(self, body: EncodeBody) -> EncodeAnswer:
        self.sent += body.texts
        self._before(len(self.sent))
        self.check()
        found = [text in self._store for text in body.texts]
        self._store.update(body.texts)
        outcomes: list[Outcome] = ["found" if there else "encoded" for there in found]
        return EncodeAnswer(tuple(outcomes), found.count(False), 8 * found.count(False))

    def is_stored(self, text: str) -> bool:
        return text in self._store

    def stop(self) -> None:
        self.is_healthy = False


@pytest.fixture(autouse=True)
def _one_passage_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_BATCH_PASSAGES", 1)


def test_passages_are_distributed_over_the_servers() -> None:
    store, second_answers = set[str](), threading.Event()
    servers = [
        StubServer("a", store, before=lambda sent: sent > 1 and second_answers.wait(60)),
        StubServer("b", store, before=lambda _: second_answers.set()),
    ]
    ticks: list[tuple[int, int]] = []
    stats = ServerPool(servers).encode(TEXTS, on_progress=lambda *tick: ticks.append(tick))
    assert (stats.computed, stats.reused) == (20, 0)
    assert (stats.computed_tokens, stats.stored_bytes) == (20, 160)
    assert sorted(servers[0].sent + servers[1].sent) == sorted(TEXTS)
    assert servers[0].sent
    assert servers[1].sent
    assert ticks[-1] == (sum(map(len, TEXTS)),) * 2


def test_passages_of_a_stopped_server_are_sent_to_another_one() -> None:
    store = set[str]()
    first = StubServer("a", store)
    first._before = lambda _: first.stop()
    second = StubServer("b", store)
    stats = ServerPool([first, second]).encode(TEXTS)
    assert stats.computed == 20
    assert store == {*TEXTS}
    assert sorted(second.sent) == sorted(TEXTS)


def test_a_server_that_recovers_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_CHECK_AGAIN_S", 0.0)
    monkeypatch.setattr(pool, "_AT_ONCE", 1)
    store, recovered, failures = set[str](), threading.Event(), [ServingError("503")]

    def fail_once(_: int) -> None:
        if failures:
            raise failures.pop()
        recovered.set()

    first = StubServer("a", store, before=fail_once)
    second = StubServer("b", store, before=lambda sent: sent > 1 and recovered.wait(60))
    assert ServerPool([first, second]).encode(TEXTS).computed == 20
    assert recovered.is_set()
    assert store == {*TEXTS}


def test_a_server_that_is_unreachable_at_the_start_is_skipped() -> None:
    store = set[str]()
    absent, present = StubServer("a", store), StubServer("b", store)
    absent.stop()
    servers = ServerPool([absent, present])
    assert servers.info == INFO
    assert servers.encode(TEXTS).computed == 20
    assert absent.sent == []


def test_a_passage_that_fails_on_every_server_ends_the_run() -> None:
    fail = Mock(side_effect=ServingError("The store is full"))
    servers = [StubServer(name, set(), before=fail) for name in "ab"]
    with pytest.raises(ServingError, match="The store is full"):
        ServerPool(servers).encode(TEXTS[:1])
    assert servers[0].sent == servers[1].sent == TEXTS[:1]


def test_a_request_is_sent_to_each_server_at_most_once() -> None:
    def fail(sent: int) -> None:
        if sent > 1:
            pytest.fail("The request was sent to the same server again")
        raise ServingError("The store is full")

    failing, stopped = StubServer("a", set(), before=fail), StubServer("b", set())
    stopped.stop()
    with pytest.raises(ServingError, match=r"The store is full|Cannot reach b"):
        ServerPool([failing, stopped]).encode(TEXTS[:1])
    assert failing.sent == TEXTS[:1]


def test_a_run_without_healthy_servers_ends() -> None:
    servers = [StubServer(name, set()) for name in "ab"]
    for server in servers:
        server.stop()
    with pytest.raises(ServingError, match="Cannot reach"):
        ServerPool(servers).encode(TEXTS)


def test_a_refusal_is_not_sent_to_another_server() -> None:
    class RefusedError(Exception):
        status_code = 400

    def refuse(_: int) -> None:
        raise ServingError("Answers 400: too long") from RefusedError()

    servers = [StubServer(name, set(), before=refuse) for name in "ab"]
    with pytest.raises(ServingError, match="too long"):
        ServerPool(servers).encode(TEXTS[:1])
    assert len(servers[0].sent + servers[1].sent) == 1


@pytest.mark.parametrize(
    "info", [replace(INFO, fingerprint="3" * 64), replace(INFO, namespace="team")]
)
def test_servers_that_encode_differently_are_refused(info: ServerInfo) -> None:
    store = set[str]()
    servers = [StubServer("a", store), StubServer("b", store, info=info)]
    with pytest.raises(ValueError, match="a different model, recipe or namespace"):
        ServerPool(servers).encode(TEXTS)


def test_servers_with_different_stores_are_refused() -> None:
    servers = [StubServer(name, set()) for name in "ab"]
    with pytest.raises(ValueError, match="pass servers that share a store"):
        ServerPool(servers).encode(TEXTS * 2)


def test_an_empty_list_of_servers_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected at least one server, found none"):
        ServerPool([])


# -- The journal -----------------------------------------------------------------------------------


def test_recorded_passages_are_skipped_without_a_request(tmp_path: Path) -> None:
    store = set[str]()
    ServerPool([StubServer("a", store)], tmp_path / "journal").encode(TEXTS[:5])
    server = StubServer("b", store)
    stats = ServerPool([server], tmp_path / "journal").encode(TEXTS)
    assert (stats.computed, stats.reused) == (15, 5)
    assert sorted(server.sent) == sorted(TEXTS[5:])
    (first, _) = sorted((tmp_path / "journal").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    records = [json.loads(line) for line in first.read_text().splitlines()]
    assert {record["handle"] for record in records} == {handle_of(text) for text in TEXTS[:5]}
    assert {record["passage"] for record in records} == {*TEXTS[:5]}
    assert {(record["server"], record["done"]) for record in records} == {("a", "encoded")}


def test_a_failed_run_continues_where_it_stopped(tmp_path: Path) -> None:
    store = set[str]()
    failing = StubServer("a", store)

    def stop_after_six(sent: int) -> None:
        if sent > 6:
            failing.stop()

    failing._before = stop_after_six
    with pytest.raises(ServingError, match="Cannot reach a"):
        ServerPool([failing], tmp_path).encode(TEXTS)
    assert 0 < len(store) < len(TEXTS)
    server = StubServer("b", store)
    stats = ServerPool([server], tmp_path).encode(TEXTS)
    assert store == {*TEXTS}
    assert len(server.sent) < len(TEXTS)
    assert stats.computed + stats.reused == len(TEXTS)


def test_passages_of_another_model_are_not_skipped(tmp_path: Path) -> None:
    ServerPool([StubServer("a", set())], tmp_path).encode(TEXTS)
    other = StubServer("b", set(), info=replace(INFO, fingerprint="3" * 64))
    assert ServerPool([other], tmp_path).encode(TEXTS).computed == 20


def test_an_incomplete_line_is_ignored(tmp_path: Path) -> None:
    ServerPool([StubServer("a", set())], tmp_path).encode(TEXTS)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-20])
    assert ServerPool([StubServer("b", set())], tmp_path).encode(TEXTS).computed == 1


def test_removing_the_journal_keeps_other_files(tmp_path: Path) -> None:
    servers = ServerPool([StubServer("a", set())], tmp_path / "journal")
    servers.encode(TEXTS[:1])
    servers.remove_journal()
    assert [*tmp_path.iterdir()] == []
    servers.encode(TEXTS)
    (tmp_path / "journal" / "notes.txt").touch()
    servers.remove_journal()
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["notes.txt"]
