"""``check_server`` passes a server that is right and finds what is wrong with others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from blockattn_rag.check.server import ServerReport, check_server
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import ServingError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, place
from blockattn_rag.model import BlockModel
from blockattn_rag.server.client import http
from blockattn_rag.server.protocol import INFO, BlockPlan
from blockattn_rag.server.served_blocks import ServedBlocks
from blockattn_rag.store import MemoryStore
from tests.models import shared_tiny_llama, tiny_model, tiny_tokenizer
from tests.recipes import recipe_of
from tests.server.client.fake_server import FakeServer

Check = Callable[..., ServerReport]

WITHOUT_MODEL = [
    "this package's endpoints",
    "full mode = vLLM's own route",
    "blocks are encoded once",
    "block mode is not full mode",
    "one block = full mode",
    "full mode after block mode",
    "block mode after full mode",
    "another cut shares no pages",
    "tenants are kept apart",
]
WITH_MODEL = [
    "fingerprint = local model's",
    "full mode = local model",
    "recipe = local recipe",
    "block mode = local model",
    "greedy tokens = local model",
]
TIMES = ["first token: full mode", "first token: miss", "first token: hit"]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(shared_tiny_llama(), tiny_tokenizer())


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    """Checks a server while it listens."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(http, "_PAUSE_S", 0.0)
    with ExitStack() as stack:

        def run(
            server: FakeServer,
            local: BlockModel | None = None,
            recipe: Recipe | None = None,
            seed: int = 1,
        ) -> ServerReport:
            url = server.url or stack.enter_context(server.listening())
            tokenizer = None if local is not None else tiny_tokenizer()
            return check_server(url, local, recipe, tokenizer=tokenizer, source=random.Random(seed))

        yield run


def failed(report: ServerReport) -> set[str]:
    return {row.name for row in report.rows if not row.passed}


def detail(report: ServerReport, name: str) -> str:
    (found,) = [row.detail for row in report.rows if row.name == name]
    return found


@pytest.mark.parametrize("kind", ["none", "sink", "adapter", "promotion"])
def test_a_right_server_passes_every_check(model: BlockModel, check: Check, kind: str) -> None:
    recipes = {"none": Recipe(), "sink": Recipe("head:4"), "adapter": recipe_of(model)}
    recipe = recipes.get(kind) or recipe_of(model, promote=1)
    report = check(FakeServer(model, recipe=recipe), model, recipe)
    assert failed(report) == set()
    assert [row.name for row in report.rows] == WITHOUT_MODEL + WITH_MODEL + TIMES
    for row in report.rows:
        if row.budget is not None:
            assert row.value is not None
            assert row.value <= row.budget
    assert detail(report, "block mode after full mode").endswith("136 from own pages")
    assert detail(report, "first token: miss").startswith("seconds; 124 tokens computed, 136")
    assert detail(report, "first token: hit").startswith("seconds; 12 tokens computed, 136")


def test_the_recipe_must_be_the_server_s(model: BlockModel, check: Check) -> None:
    report = check(FakeServer(model, recipe=recipe_of(model)), model, Recipe("head:4"))
    assert failed(report) == {"recipe = local recipe"}
    assert "pass the server's recipe as --recipe" in detail(report, "recipe = local recipe")


def test_the_model_need_not_be_here(model: BlockModel, check: Check) -> None:
    report = check(FakeServer(model))
    assert failed(report) == set()
    assert [row.name for row in report.rows] == WITHOUT_MODEL + TIMES


@pytest.mark.parametrize(("keeps", "left"), [(True, 1), (False, 3)])
def test_leaves_little_in_store(model: BlockModel, check: Check, keeps: bool, left: int) -> None:
    server = FakeServer(model, keeps=keeps)
    report = check(server, model)
    assert failed(report) == set()
    stats = server.store.stats()
    assert (report.left_blocks, report.left_bytes) == (left, stats.total_bytes)
    assert stats.entries == left
    assert server.kept.stats().entries == 3 - left
    assert detail(report, "blocks are encoded once").endswith(f"; {left} of 3 stored")


def test_two_runs_have_no_block_in_common(model: BlockModel, check: Check) -> None:
    server = FakeServer(model)
    for seed in (1, 2):
        assert failed(check(server, seed=seed)) == set()
    assert server.store.stats().entries == 2
    # The same tokens again are no fresh probe.
    assert failed(check(server, seed=1)) >= {"blocks are encoded once"}


def test_a_server_that_only_reads_is_left_as_it_is(model: BlockModel, check: Check) -> None:
    server = FakeServer(model, read_only=True)
    report = check(server, model)
    assert failed(report) == set()
    assert [row.name for row in report.rows] == [*WITHOUT_MODEL[:-1], *WITH_MODEL, *TIMES]
    assert detail(report, "blocks are encoded once").startswith("3 for the first answer, 0 later;")
    assert (report.left_blocks, report.left_bytes) == (0, 0)
    assert server.store.stats().entries == 0


def test_server_without_encoding_gets_full_mode(model: BlockModel, check: Check) -> None:
    server = FakeServer(model, read_only=True, keeps=False)
    report = check(server, model)
    assert failed(report) == set()
    names = [row.name for row in report.rows]
    assert names == [*WITHOUT_MODEL[:2], *WITH_MODEL[:2], TIMES[0]]
    assert (report.has_blocks, report.left_blocks, report.left_bytes) == (False, 0, 0)


class SharesPages(FakeServer):
    """Pages of equal tokens are shared, however they were computed."""

    def page_key(self, ids: list[int], plan: BlockPlan | None, salt: str | None) -> object:
        return tuple(ids), salt


class AnswersInFull(FakeServer):
    """It says block mode, and answers in full mode."""

    def context(
        self, ids: list[int], plan: BlockPlan | None, salt: str | None
    ) -> tuple[Context, ServedBlocks | None]:
        return place([]), super().context(ids, plan, salt)[1]


class LeavesKeysAsTheyAre(FakeServer):
    """Keys are not turned to their places."""

    def context(
        self, ids: list[int], plan: BlockPlan | None, salt: str | None
    ) -> tuple[Context, ServedBlocks | None]:
        context, served = super().context(ids, plan, salt)
        return place([one.kv for one in context.blocks], "composite"), served


class Forgetful(MemoryStore):
    """Keeps nothing."""

    def __init__(self) -> None:
        super().__init__(1 << 20)

    def put(self, key: str, kv: BlockKV) -> None:
        """Let it go."""


class Damaging(MemoryStore):
    """Gives other values than it was given."""

    def __init__(self) -> None:
        super().__init__(1 << 28)

    def put(self, key: str, kv: BlockKV) -> None:
        super().put(key, replace(kv, values=tuple(-one for one in kv.values)))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            SharesPages,
            {"full mode after block mode", "another cut shares no pages", "one block = full mode"},
        ),
        (
            AnswersInFull,
            {
                "block mode is not full mode",
                "block mode = local model",
                "greedy tokens = local model",
            },
        ),
        (LeavesKeysAsTheyAre, {"block mode = local model", "greedy tokens = local model"}),
        (lambda model: FakeServer(model, Forgetful()), {"blocks are encoded once"}),
        (lambda model: FakeServer(model, Damaging()), {"one block = full mode"}),
    ],
)
def test_what_is_wrong_is_found(
    model: BlockModel, check: Check, make: Callable[[BlockModel], FakeServer], expected: set[str]
) -> None:
    report = check(make(model), model)
    assert failed(report) >= expected
    assert "full mode = local model" not in failed(report)
    assert not report.passed


def test_blocks_in_int8_are_judged_by_their_own_rounding(model: BlockModel, check: Check) -> None:
    class Rounds(MemoryStore):
        def put(self, key: str, kv: BlockKV) -> None:
            super().put(key, replace(kv, values=tuple(1.1 * one for one in kv.values)))

    class TellsOfInt8(FakeServer):
        def context(
            self, ids: list[int], plan: BlockPlan | None, salt: str | None
        ) -> tuple[Context, ServedBlocks | None]:
            context, served = super().context(ids, plan, salt)
            blocks = len(context.blocks)
            return context, served and replace(served, int8_blocks=blocks)

    assert failed(check(TellsOfInt8(model, Rounds(1 << 28)), model)) == set()
    assert "one block = full mode" in failed(check(FakeServer(model, Rounds(1 << 28))))


@pytest.mark.parametrize(
    ("tenants", "expected"),
    [
        (True, "a block of '' is missing for 'check-"),
        (False, "no tenants: the server refuses x-tenant-id"),
        (None, "x-tenant-id is set or stripped on the way"),
    ],
)
def test_judges_tenants(
    model: BlockModel, check: Check, tenants: bool | None, expected: str
) -> None:
    report = check(FakeServer(model, tenants=tenants))
    assert failed(report) == set()
    assert detail(report, "tenants are kept apart").startswith(expected)


def test_a_tenant_that_finds_what_others_stored_is_told(model: BlockModel, check: Check) -> None:
    class OneForAll(FakeServer):
        def encode(self, told: object, namespace: str = "") -> dict[str, object]:
            return super().encode(told)

    report = check(OneForAll(model, tenants=True))
    assert failed(report) == {"tenants are kept apart"}
    assert "expected missing" in detail(report, "tenants are kept apart")


def test_another_model_here_is_told_and_not_compared(model: BlockModel, check: Check) -> None:
    other = BlockModel(tiny_model("mistral"), tiny_tokenizer())
    report = check(FakeServer(model), other)
    assert failed(report) == {"fingerprint = local model's"}
    assert [row.name for row in report.rows] == [*WITHOUT_MODEL, WITH_MODEL[0], *TIMES]
    told = detail(report, "fingerprint = local model's")
    assert model.fingerprint[:12] in told
    assert other.fingerprint[:12] in told


def test_a_server_of_another_kind_or_release_is_refused(model: BlockModel, check: Check) -> None:
    plain = FakeServer(model, with_connector=False)
    with pytest.raises(ServingError, match="connector and endpoint are not configured"):
        check(plain)
    assert {path for path, _ in plain.requests} == {INFO}
    newer = FakeServer(model)
    newer.info["v"] = 99
    with pytest.raises(ServingError, match="Found version 99 of info, expected 1"):
        check(newer)
