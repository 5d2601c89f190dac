"""The endpoints in ``vllm serve``: blocks are ensured, and vLLM's handlers answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from vllm.logging_utils.dump_input import prepare_object_to_dump

from blockattn_rag.check.server import check_server
from blockattn_rag.prompts.blocks import PRIVATE, STORED
from blockattn_rag.server.protocol import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    ENCODE,
    INFO,
    BlockPlan,
    EncodeAnswer,
    ServerInfo,
)
from blockattn_rag.server.served_blocks import ServedBlocks
from blockattn_rag.server.vllm.scheduler import Load, Orders, Save
from blockattn_rag.store import DirectoryStore
from tests_vllm.reference import Reference
from tests_vllm.server import KEY, NAME, Server, serving

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


def answered(response: httpx.Response) -> tuple[list[int], ServedBlocks]:
    assert response.status_code == 200, response.text
    told = response.json()
    return told["choices"][0]["token_ids"], ServedBlocks.from_dict(told["kv_transfer_params"])


def test_the_server_tells_of_itself(reference: Reference, server: Server) -> None:
    info = ServerInfo.from_dict(server.http.get(INFO).json())
    assert info.fingerprint == reference.profile.fingerprint
    assert info.models == (NAME,)
    assert info.max_tokens == 2048


def test_nobody_is_answered_without_the_key(reference: Reference, server: Server) -> None:
    for path in (COMPLETIONS, CHAT_COMPLETIONS, ENCODE):
        assert server.post(path, reference.case(1).body(), Authorization="").status_code == 401
    assert server.http.get(INFO, headers={"Authorization": "Bearer x"}).status_code == 401


def test_missing_blocks_are_encoded_and_then_found(reference: Reference, server: Server) -> None:
    case = reference.case(10)
    for encoded in (len(case.lengths), 0):
        tokens, served = answered(server.post(COMPLETIONS, case.body()))
        assert tokens == reference.answer(case)
        assert (served.blocks, served.encoded) == (len(case.lengths), encoded)
        assert served.encoded_tokens == (sum(case.lengths) if encoded else 0)


def test_stream_ends_with_blocks_and_usage(reference: Reference, server: Server) -> None:
    case = reference.case(19)
    events = [*server.events(COMPLETIONS, case.body(stream_options={"include_usage": True}))]
    tokens = [id_ for one in events for choice in one["choices"] for id_ in choice["token_ids"]]
    assert tokens == reference.answer(case)
    (told,) = [one["kv_transfer_params"] for one in events if "kv_transfer_params" in one]
    assert ServedBlocks.from_dict(told).encoded == len(case.lengths) - 1  # the system message is
    assert events[-1]["usage"]["prompt_tokens"] == len(case.ids)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT_COMPLETIONS])
def test_stopped_answer_reports_blocks(reference: Reference, server: Server, path: str) -> None:
    case = reference.case(9)
    whole = reference.answer(case)
    text = reference.model.tokenizer.tokenizer.decode(whole)
    asked = case.body(min_tokens=0, stop=[text[12:16]])
    if path == CHAT_COMPLETIONS:
        asked["messages"] = [{"role": "user", "content": "not used"}]
        asked["kv_transfer_params"] = {"prompt_token_ids": asked.pop("prompt"), **case.params}
    tokens, served = answered(server.post(path, asked))
    assert tokens == whole[: len(tokens)]
    assert 0 < len(tokens) < len(whole)
    assert (served.blocks, served.cut_short) == (len(case.lengths), True)
    events = [*server.events(path, asked)]
    (told,) = [one["kv_transfer_params"] for one in events if one.get("kv_transfer_params")]
    choices = [choice for one in events for choice in one["choices"]]
    assert [id_ for one in choices for id_ in one.get("token_ids") or ()] == tokens
    assert ServedBlocks.from_dict(told) == ServedBlocks(len(case.lengths), 0, 0, cut_short=True)


def test_context_in_the_engine_is_local(reference: Reference, server: Server) -> None:
    case = reference.case(5)
    long = reference.case_of((*case.texts[:-1], "And" + " a" * 300 + case.texts[-1]))
    for _ in range(2):
        _, served = answered(server.post(COMPLETIONS, long.body()))
    assert (served.loaded_tokens, served.local_tokens) == (0, sum(long.lengths))


def test_abandoned_stream_frees_its_pages(reference: Reference, server: Server) -> None:
    case = reference.case(3)
    events = server.events(COMPLETIONS, case.body(max_tokens=1000, min_tokens=1000))
    next(events)
    events.close()
    tokens, _ = answered(server.post(COMPLETIONS, case.body()))
    assert tokens == reference.answer(case)
    assert server.counted("vllm:num_requests_running") == 0
    assert server.counted("vllm:kv_cache_usage_perc") == 0


def test_a_chat_is_answered_from_its_token_ids(reference: Reference, server: Server) -> None:
    case = reference.case(21)
    asked = case.body() | {
        "messages": [{"role": "user", "content": "not used"}],
        "kv_transfer_params": {"prompt_token_ids": case.ids, **case.params},
    }
    del asked["prompt"]
    tokens, served = answered(server.post(CHAT_COMPLETIONS, asked))
    assert tokens == reference.answer(case)
    assert served.blocks == len(case.lengths)


def test_request_without_plan_is_full_mode(reference: Reference, server: Server) -> None:
    case = reference.case(23)
    asked = case.body()
    del asked["kv_transfer_params"]
    response = server.post(COMPLETIONS, asked)
    assert response.json()["choices"][0]["token_ids"] == reference.answer(case, "full")
    assert response.json()["kv_transfer_params"] is None


def test_repairs_damaged_entry(reference: Reference, server: Server, store: DirectoryStore) -> None:
    fresh = reference.case(8)
    server.post(ENCODE, {"blocks": fresh.blocks, "opens_prompt": True})
    (path,) = store.path.rglob(f"*{reference.key(fresh.blocks[2])}*")
    data = bytearray(path.read_bytes())
    data[-50] ^= 0xFF
    path.write_bytes(bytes(data))
    tokens, served = answered(server.post(COMPLETIONS, fresh.body()))
    assert tokens == reference.answer(fresh)
    assert served.encoded == 1


def test_concurrent_clients_get_right_answers(reference: Reference, server: Server) -> None:
    cases = [reference.case(16 + place % 4, records=3) for place in range(16)]
    with ThreadPoolExecutor(16) as threads:
        said = [*threads.map(lambda case: answered(server.post(COMPLETIONS, case.body())), cases)]
    assert [tokens for tokens, _ in said] == [reference.answer(case) for case in cases]


def test_blocks_are_looked_for_encoded_and_found(reference: Reference, server: Server) -> None:
    blocks = reference.case(30).blocks[1:]
    answers = [
        EncodeAnswer.from_dict(server.post(ENCODE, {"blocks": blocks, **more}).json())
        for more in ({"only_look": True}, {}, {})
    ]
    assert [one.blocks for one in answers] == [
        (outcome,) * len(blocks) for outcome in ("missing", "encoded", "found")
    ]
    assert answers[1].stored_bytes == (sum(map(len, blocks)) * reference.profile.bytes_per_token)


def test_tenants_share_nothing(reference: Reference, server: Server, store: DirectoryStore) -> None:
    block = reference.case(31).blocks[1]
    asked = {"blocks": [block]}
    for tenant in ("a", "b"):
        told = server.post(ENCODE, asked, **{"x-tenant-id": tenant}).json()
        assert EncodeAnswer.from_dict(told).blocks == ("encoded",)
    assert reference.key(block, "a") in store
    assert reference.key(block, "b") in store
    assert reference.key(block) not in store


def test_tenants_share_no_pages_in_full_mode(reference: Reference, server: Server) -> None:
    case = reference.case(12, records=3)
    asked = case.body()
    del asked["kv_transfer_params"]
    hits = []
    for tenant in ("a", "b", "a"):
        before = server.counted("vllm:prefix_cache_hits_total")
        told = server.post(COMPLETIONS, asked, **{"x-tenant-id": tenant}).json()
        assert told["choices"][0]["token_ids"] == reference.answer(case, "full")
        hits.append(server.counted("vllm:prefix_cache_hits_total") - before > 0)
    assert hits == [False, False, True]


def test_private_is_per_tenant(reference: Reference, server: Server, store: DirectoryStore) -> None:
    case = reference.case(32)
    keep = (STORED, PRIVATE, *[STORED] * (len(case.lengths) - 2))
    params = BlockPlan("complete", case.lengths, keep=keep).to_dict()
    own = reference.key(case.blocks[1])
    for tenant, encoded in (("c", 6), ("c", 0), ("d", 6), ("d", 0)):
        asked = case.body(kv_transfer_params=params)
        tokens, served = answered(server.post(COMPLETIONS, asked, **{"x-tenant-id": tenant}))
        assert tokens == reference.answer(case)
        assert served.encoded == encoded
        keys = [reference.key(case.blocks[1], name) for name in ("", tenant, f"{tenant}/private")]
        assert not [key for key in keys if key in store]
        assert reference.key(case.blocks[2], tenant) in store
    assert own not in store
    assert server.counted("vllm:blockattn_kept_blocks_total") == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"echo": True}, "echo is not possible"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not possible"),
        ({"use_beam_search": True}, "use_beam_search is not possible"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not possible"),
        ({"prompt": [10**30] * 300}, "A block has invalid token ids"),
        ({"prompt": "text"}, "one prompt as a list of token ids"),
        ({"prompt": [[1, 2], [3, 4]]}, "one prompt as a list of token ids"),
        ({"kv_transfer_params": {"blockattn": {"v": 1}}}, "no field 'op'"),
        (
            {"kv_transfer_params": {"blockattn": {"v": 1, "op": "encode", "lengths": [1]}}},
            "with op='complete'",
        ),
        ({"structured_outputs": {"grammar": '%llguidance {}\nstart: "a"'}}, "found auto; start"),
    ],
)
def test_what_block_mode_cannot_do_is_refused_with_a_reason(
    reference: Reference, server: Server, changed: dict[str, Any], message: str
) -> None:
    response = server.post(COMPLETIONS, reference.case(1).body(**changed))
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_refusal_encodes_none(reference: Reference, server: Server, store: DirectoryStore) -> None:
    before = {*store.keys()}
    fresh = reference.case(33)
    long = [*fresh.ids, *fresh.ids[-1:] * 2048]
    for changed, message in (
        ({"prompt": long}, "expected at most 2047: the server's max_model_len is 2048"),
        ({"model": "another"}, "Found the model 'another', expected one of bundled"),
    ):
        response = server.post(COMPLETIONS, fresh.body(**changed))
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    assert {*store.keys()} == before


def test_a_body_that_is_nested_too_deeply_is_refused(server: Server) -> None:
    json = {"Content-Type": "application/json"}
    response = server.http.post(ENCODE, content=b"[" * 100_000, headers=json)
    assert response.status_code == 400


def test_a_bad_tenant_or_model_is_refused(server: Server) -> None:
    bad = server.post(ENCODE, {"blocks": [[5]]}, **{"x-tenant-id": "a b/"})
    assert bad.status_code == 400
    assert "A namespace consists" in bad.json()["error"]["message"]
    for tenants in (["a", "b"], [""]):
        headers = [("Authorization", f"Bearer {KEY}"), *(("x-tenant-id", one) for one in tenants)]
        unclear = httpx.post(
            server.http.base_url.join(ENCODE), json={"blocks": [[5]]}, headers=headers
        )
        assert unclear.status_code == 400
        assert "expected one name" in unclear.json()["error"]["message"]
    assert server.http.post(ENCODE, json={"model": "x", "blocks": [[5]]}).status_code == 400
    assert server.post(ENCODE, {"blocks": [[99_999]]}).status_code == 400


def test_the_check_of_a_server_passes_and_leaves_little(
    reference: Reference, server: Server, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    before = store.stats()
    report = check_server(str(server.http.base_url), reference.model, api_key=KEY)
    rows = {row.name: row for row in report.rows}
    assert [name for name, row in rows.items() if not row.passed] == []
    assert rows["block mode after full mode"].detail.endswith("; 128 from own pages")
    assert "is missing for 'check-" in rows["tenants are kept apart"].detail
    assert rows["greedy tokens = local model"].detail == "8 tokens"
    assert store.stats().entries - before.entries == report.left_blocks == 1


def test_what_is_counted_is_told_to_prometheus(server: Server) -> None:
    for name in ("answers", "loaded_tokens", "loads", "saved_blocks", "loaded_bytes"):
        assert server.counted(f"vllm:blockattn_{name}_total") > 0
    assert server.counted("vllm:blockattn_tier_hits_total") > 0
    told = server.http.get("/metrics").text
    for path in (COMPLETIONS, CHAT_COMPLETIONS, ENCODE):
        for status in (200, 400) if path != CHAT_COMPLETIONS else (200,):
            assert f'blockattn_requests_total{{path="{path}",status="{status}"}}' in told
    assert re.search(r"^blockattn_cut_answers_total [1-9]", told, re.MULTILINE)


@pytest.mark.parametrize("path", ["/v1/completions", COMPLETIONS, ENCODE])
def test_logs_hold_nothing_that_was_sent(reference: Reference, server: Server, path: str) -> None:
    word, ids = "Halden-is-a-secret", reference.case(1).ids
    for sent in (
        {"prompt": ids, "kv_transfer_params": {"blockattn": {"v": 1, "op": word, "lengths": [1]}}},
        {"prompt": ids, "kv_transfer_params": {"blockattn": {word: ids}}},
        {"prompt": word, "kv_transfer_params": reference.case(1).params},
        {"prompt": ids, "kv_transfer_params": {"blockattn": word}, "user": [word]},
        {"blocks": word},
    ):
        assert not server.post(path, sent).is_success
    log = server.log.read_text()
    assert "Application startup complete" in log
    assert "DEBUG" in log
    for text in (word, "Company", SECRET, str(ids[:8])[1:-1]):
        assert text not in log


def test_what_fails_in_a_step_is_shown_without_tokens(reference: Reference) -> None:
    case = reference.case(2)
    plan = BlockPlan("complete", case.lengths)
    orders = Orders([Load("one", plan, case.ids, [7], 0)], [Save("two", plan, case.ids, [8])])
    told = f"{prepare_object_to_dump(orders)} {orders}"
    assert "one" in told
    assert str(case.ids[:4])[1:-1] not in told
