"""The endpoints in ``vllm serve`` encode missing blocks, and vLLM's handlers answer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from vllm.logging_utils.dump_input import prepare_object_to_dump

from blockattn_rag.check.server import check_server
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.protocol import ENCODE, INFO, EncodeAnswer, ServerInfo, marker_key_id
from blockattn_rag.server.vllm.scheduler import Load, Orders, Save
from blockattn_rag.store import DirectoryStore
from tests_vllm.reference import Reference
from tests_vllm.server import CHATS, COMPLETIONS, KEY, NAME, Server, serving

SECRET = "a long secret of this server"


@pytest.fixture(scope="module")
def server(reference: Reference) -> Iterator[Server]:
    environment = {"TENANT_SECRET": SECRET, "VLLM_LOGGING_LEVEL": "DEBUG"}
    yield from serving(
        reference, "served", environment=environment, tenant_secret_env="TENANT_SECRET"
    )


@pytest.fixture
def store(reference: Reference) -> DirectoryStore:
    return DirectoryStore(reference.folder / "served")


def test_the_info_endpoint_describes_the_server(reference: Reference, server: Server) -> None:
    info = ServerInfo.from_dict(server.http.get(INFO).json())
    assert info.fingerprint == reference.profile.fingerprint
    assert info.models == (NAME,)
    assert info.max_tokens == 2048
    assert info.has_chat_template
    assert info.marker_key == marker_key_id()


def test_requests_without_the_key_are_refused(reference: Reference, server: Server) -> None:
    for path in (COMPLETIONS, CHATS, ENCODE):
        assert server.post(path, reference.case(1).body(), Authorization="").status_code == 401
    assert server.http.get(INFO, headers={"Authorization": "Bearer x"}).status_code == 401


def test_missing_blocks_are_encoded_and_then_found(reference: Reference, server: Server) -> None:
    case = reference.case(10)
    for misses in (len(case.lengths), 0):
        answer = server.ask(case.body())
        assert answer.tokens == reference.answer(case)
        assert answer.report == {
            "mode": "block",
            "hits": len(case.lengths) - misses,
            "misses": misses,
            "reused_tokens": 0 if misses else sum(case.lengths),
            "computed_tokens": len(case.ids) - (0 if misses else sum(case.lengths)),
            "recipe": "none",
        }


def test_a_context_in_the_prefix_cache_is_local(reference: Reference, server: Server) -> None:
    case = reference.case(5)
    long = reference.case_of((*case.texts[:-1], "And" + " a" * 300 + case.texts[-1]))
    server.ask(long.body())
    before = server.counted("vllm:blockattn_local_tokens_total")
    server.ask(long.body())
    after = server.counted("vllm:blockattn_local_tokens_total")
    assert after - before == sum(long.lengths)


def test_an_abandoned_stream_frees_its_pages(reference: Reference, server: Server) -> None:
    case = reference.case(3)
    events = server.events(COMPLETIONS, case.body(max_tokens=1000, min_tokens=1000))
    next(events)
    events.close()
    assert server.ask(case.body()).tokens == reference.answer(case)
    assert server.counted("vllm:num_requests_running") == 0
    assert server.counted("vllm:kv_cache_usage_perc") == 0


def test_a_prompt_without_passages_is_passed_to_vllm(server: Server) -> None:
    body = {"prompt": "How tall is Halden Tower?", "max_tokens": 8, "temperature": 0}
    answer = server.ask(body)
    assert answer.report == {"mode": "full"}
    plain = server.post("/v1/completions", body).json()
    assert answer.text == plain["choices"][0]["text"]


def test_documents_precede_the_prompt_of_a_completion(reference: Reference, server: Server) -> None:
    case = reference.case(22)
    documents = [{"text": text} for text in case.texts[1:-1]]
    body = case.body(prompt=case.texts[-1], documents=documents)
    expected = reference.case_of(("", *case.texts[1:]))
    server.ask(body)
    answer = server.ask(body)
    assert answer.tokens == reference.answer(expected)
    assert (answer.report["hits"], answer.report["misses"]) == (len(documents), 0)


def test_a_damaged_entry_is_repaired(
    reference: Reference, server: Server, store: DirectoryStore
) -> None:
    fresh = reference.case(8)
    server.client().encode(fresh.texts[1:-1])
    server.ask(reference.case(9).body())  # keeps the system text in memory
    (path,) = store.path.rglob(f"*{reference.key(fresh.blocks[2])}*")
    data = bytearray(path.read_bytes())
    data[-50] ^= 0xFF
    path.write_bytes(bytes(data))
    answer = server.ask(fresh.body())
    assert answer.tokens == reference.answer(fresh)
    # The retry encodes the damaged block, and the system text, which may be lost from memory.
    assert answer.report["misses"] == 2


def test_concurrent_clients_get_correct_answers(reference: Reference, server: Server) -> None:
    cases = [reference.case(16 + place % 4, records=3) for place in range(16)]
    with ThreadPoolExecutor(16) as threads:
        answers = [*threads.map(lambda case: server.ask(case.body()), cases)]
    assert [answer.tokens for answer in answers] == [reference.answer(case) for case in cases]


def test_tenants_share_nothing(reference: Reference, server: Server, store: DirectoryStore) -> None:
    case = reference.case(31)
    block, body = case.blocks[1], {"texts": case.texts[1:2]}
    for tenant in ("a", "b"):
        answer = server.post(ENCODE, body, **{"x-tenant-id": tenant}).json()
        assert EncodeAnswer.from_dict(answer).passages == ("encoded",)
    assert reference.key(block, "a") in store
    assert reference.key(block, "b") in store
    assert reference.key(block) not in store


def test_tenants_share_no_pages_in_full_mode(reference: Reference, server: Server) -> None:
    case = reference.case(12, records=3)
    body = case.body(blockattn={"mode": "full"})
    hits = []
    for tenant in ("a", "b", "a"):
        before = server.counted("vllm:prefix_cache_hits_total")
        answer = server.ask(body, **{"x-tenant-id": tenant})
        assert answer.tokens == reference.answer(case, "full")
        hits.append(server.counted("vllm:prefix_cache_hits_total") - before > 0)
    assert hits == [False, False, True]


def test_private_blocks_belong_to_one_tenant(
    reference: Reference, server: Server, store: DirectoryStore
) -> None:
    case = reference.case(32)
    head, passage = case.blocks[:2]  # the text before the passages is private
    misses, kept = len(case.lengths), server.counted("vllm:blockattn_kept_blocks_total")
    for tenant, expected in (("c", misses), ("c", 0), ("d", misses), ("d", 0)):
        answer = server.ask(case.body(), **{"x-tenant-id": tenant})
        assert answer.tokens == reference.answer(case)
        assert answer.report["misses"] == expected
        keys = [reference.key(head, name) for name in ("", tenant, f"{tenant}/private")]
        assert not [key for key in keys if key in store]
        assert reference.key(passage, tenant) in store
    assert server.counted("vllm:blockattn_kept_blocks_total") - kept == 2


def test_a_signed_plan_is_needed_for_a_tenant(reference: Reference, server: Server) -> None:
    case = reference.case(32)
    for secret in (None, "another secret"):
        params = BlockPlan("complete", case.lengths, "c", case.keep).to_dict(secret)
        body = {"prompt": case.ids, "kv_transfer_params": params, "max_tokens": 2}
        assert not server.post("/v1/completions", body).is_success


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"echo": True}, "echo is not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
        ({"use_beam_search": True}, "use_beam_search is not supported"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported"),
        ({"structured_outputs": {"grammar": '%llguidance {}\nstart: "a"'}}, "found auto; start"),
    ],
)
def test_unsupported_requests_are_refused_with_a_reason(
    reference: Reference, server: Server, changed: dict[str, Any], message: str
) -> None:
    assert message in server.refusal(reference.case(1).body(**changed))


def test_a_refused_request_encodes_nothing(
    reference: Reference, server: Server, store: DirectoryStore
) -> None:
    before = {*store.keys()}
    fresh = reference.case(33)
    for changed, message in (
        (
            {"prompt": fresh.marked + " a" * 2048},
            "expected at most 2047 (max_model_len minus one token)",
        ),
        ({"model": "another"}, "Unknown model 'another': expected one of bundled"),
    ):
        assert message in server.refusal(fresh.body(**changed))
    assert {*store.keys()} == before


def test_an_invalid_tenant_is_refused(server: Server) -> None:
    bad = server.post(ENCODE, {"texts": ["x"]}, **{"x-tenant-id": "a b/"})
    assert bad.status_code == 400
    assert "A namespace consists" in bad.json()["error"]["message"]
    for tenants in (["a", "b"], [""]):
        headers = [("Authorization", f"Bearer {KEY}"), *(("x-tenant-id", one) for one in tenants)]
        unclear = httpx.post(
            server.http.base_url.join(ENCODE), json={"texts": ["x"]}, headers=headers
        )
        assert unclear.status_code == 400
        assert "expected one, which must not be empty" in unclear.json()["error"]["message"]


def test_check_server_passes(server: Server, store: DirectoryStore) -> None:
    before = store.stats()
    reports = [check_server(server.client()) for _ in range(2)]
    assert [row.name for row in reports[0].rows if not row.passed] == []
    assert [report.block for report in reports] == [reports[0].block] * 2
    assert store.stats().entries - before.entries == 2


def test_counts_are_exported_to_prometheus(server: Server) -> None:
    for name in ("answers", "loaded_tokens", "loads", "saved_blocks", "loaded_bytes"):
        assert server.counted(f"vllm:blockattn_{name}_total") > 0
    assert server.counted("vllm:blockattn_tier_hits_total") > 0
    metrics = server.http.get("/metrics").text
    for path in (COMPLETIONS, CHATS, ENCODE):
        for status in (200, 400) if path != CHATS else (200,):
            assert f'blockattn_requests_total{{path="{path}",status="{status}"}}' in metrics


@pytest.mark.parametrize("path", ["/v1/completions", COMPLETIONS, ENCODE])
def test_logs_contain_no_request_contents(reference: Reference, server: Server, path: str) -> None:
    word, ids = "Halden-is-a-secret", reference.case(1).ids
    for sent in (
        {"prompt": ids, "kv_transfer_params": {"blockattn": {"v": 2, "op": word, "lengths": [1]}}},
        {"prompt": ids, "kv_transfer_params": {"blockattn": {word: ids}}},
        {"prompt": word, "kv_transfer_params": reference.case(1).params},
        {"prompt": ids, "kv_transfer_params": {"blockattn": word}, "user": [word]},
        {"texts": word},
    ):
        assert not server.post(path, sent).is_success
    log = server.log.read_text()
    assert "Application startup complete" in log
    assert "DEBUG" in log
    for text in (word, "Company", SECRET, str(ids[:8])[1:-1]):
        assert text not in log


def test_errors_of_a_step_are_logged_without_tokens(reference: Reference) -> None:
    case = reference.case(2)
    plan = BlockPlan("complete", case.lengths)
    orders = Orders([Load("one", plan, case.ids, [[7]], 0)], saves=[Save("two", plan, case.ids)])
    dumped = f"{prepare_object_to_dump(orders)} {orders}"
    assert "one" in dumped
    assert str(case.ids[:4])[1:-1] not in dumped
