"""The routes for OpenAI clients: passages in requests are blocks, and answers are vLLM's."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from blockattn_rag import BlockAttentionEngine, MemoryStore
from blockattn_rag.prompts.formats import CHAT, Passage
from blockattn_rag.server.protocol import ENCODE, OPENAI
from blockattn_rag.store import DirectoryStore
from tests_vllm.reference import Reference
from tests_vllm.server import CHATS, COMPLETIONS, KEY, NAME, Server, serving

FRONT_ENDS = json.loads((Path(__file__).parents[1] / "tests/front_ends.json").read_text())
SECRET = "a long secret of this server"
GREEDY = {"temperature": 0, "max_tokens": 24}


TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"metres": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["metres"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(reference: Reference) -> Iterator[Server]:
    yield from serving(
        reference,
        "openai",
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        environment={"TENANT_SECRET": SECRET},
        tenant_secret_env="TENANT_SECRET",
        recognize="sources",
    )


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=str(server.http.base_url.join(OPENAI)), api_key=KEY)


def asked(reference: Reference, number: int, **more: Any) -> dict[str, Any]:
    """Return a body with the passages of a bundled record as documents."""
    _, *passages, question = reference.case(number).texts
    return {
        "messages": [{"role": "user", "content": question}],
        "documents": [{"title": f"Note {number}", "text": text} for text in passages],
        **GREEDY,
        **more,
    }


def answered(server: Server, body: dict[str, Any], **headers: str) -> Any:
    response = server.post(CHATS, body, **headers)
    assert response.status_code == 200, response.text
    return response.json()


def said(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_the_models_are_listed_and_the_key_is_checked(server: Server) -> None:
    listed = server.http.get(f"{OPENAI}/models").json()
    assert [one["id"] for one in listed["data"]] == [NAME]
    assert server.http.get(f"{OPENAI}/models", headers={"Authorization": ""}).status_code == 401
    assert server.post(CHATS, {"messages": []}, Authorization="").status_code == 401


def test_documents_are_passages(reference: Reference, server: Server) -> None:
    body = asked(reference, 11)
    passages = [Passage(one["title"], one["text"]) for one in body["documents"]]
    tokenizer = reference.model.tokenizer.tokenizer
    prompt = CHAT.prompt(body["messages"][0]["content"], passages, tokenizer)
    local = BlockAttentionEngine(reference.model, MemoryStore(1 << 28), resident_bytes=0)
    expected = local.generate(prompt, temperature=0.0, max_new_tokens=24)
    answered(server, body)
    context = sum(len(ids) for ids in reference.model.tokenizer.prompt_ids(prompt).context)
    answer = answered(server, body)
    assert said(answer) == expected.text
    assert answer["blockattn"] == {
        "mode": "block",
        "hits": len(passages) + 1,
        "misses": 0,
        "reused_tokens": context,
        "computed_tokens": expected.stats.prompt_tokens - context,
        "recipe": "none",
    }
    usage = answer["usage"]
    assert usage["prompt_tokens"] == expected.stats.prompt_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] >= context
    assert "kv_transfer_params" not in answer
    full = answered(server, {**body, "blockattn": {"mode": "full"}})
    expected = local.generate(prompt, mode="full", temperature=0.0, max_new_tokens=24)
    assert (said(full), full["blockattn"]) == (expected.text, {"mode": "full"})
    assert full["usage"]["prompt_tokens"] == usage["prompt_tokens"]


def test_streams_the_answer(reference: Reference, server: Server, client: openai.OpenAI) -> None:
    body = asked(reference, 13)
    answered(server, body)  # the first request stores the passages
    whole = answered(server, body)
    extra = {"documents": body.pop("documents")}
    chunks = [
        *client.chat.completions.create(
            model=NAME,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
            **body,
        )
    ]
    texts = [one.choices[0].delta.content or "" for one in chunks if one.choices]
    assert "".join(texts) == said(whole)
    ends = [one for one in chunks if one.choices and one.choices[0].finish_reason]
    assert [one.model_extra["blockattn"] for one in ends if one.model_extra] == [whole["blockattn"]]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert usage.prompt_tokens_details.cached_tokens == cached
    assert not any("kv_transfer_params" in (one.model_extra or {}) for one in chunks)


def test_a_chat_without_passages_is_unchanged(server: Server, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "How tall is Halden Tower?"}]
    answer = client.chat.completions.create(model=NAME, messages=messages, **GREEDY)  # type: ignore[call-overload]
    plain = server.post("/v1/chat/completions", {"messages": messages, **GREEDY}).json()
    assert answer.choices[0].message.content == said(plain)
    assert answer.model_extra["blockattn"] == {"mode": "full"}
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_parts_of_a_message_are_passages(reference: Reference, server: Server) -> None:
    _, *passages, question = reference.case(14).texts
    parts = [{"type": "text", "text": text} for text in (*passages, question)]
    body = {"messages": [{"role": "user", "content": parts}], "blockattn": {"parts": "passages"}}
    answered(server, {**body, **GREEDY})
    answer = answered(server, {**body, **GREEDY})
    assert answer["blockattn"]["hits"] == len(passages) + 1
    turned = {"messages": [{"role": "user", "content": [*parts[-2::-1], parts[-1]]}]}
    again = answered(server, {**body, **turned, **GREEDY})
    assert again["blockattn"] == answer["blockattn"]


@pytest.mark.parametrize("stream", [False, True])
def test_schemas_constrain_answers(reference: Reference, server: Server, stream: bool) -> None:
    schema = {"name": "height", "schema": TOOL["function"]["parameters"]}  # type: ignore[index]
    # The penalty ends repeated spaces, which the grammar of calls allows.
    body = asked(reference, 15, max_tokens=128, frequency_penalty=2.0)
    for more in (
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "measure"}}},
    ):
        if stream:
            events = [*server.events(CHATS, body | more)]
            deltas = [choice["delta"] for one in events for choice in one["choices"]]
            calls = [call for one in deltas for call in one.get("tool_calls") or ()]
            text = "".join(call["function"].get("arguments") or "" for call in calls)
            text = text or "".join(one.get("content") or "" for one in deltas)
        else:
            message = answered(server, body | more)["choices"][0]["message"]
            calls = message.get("tool_calls") or ()
            text = calls[0]["function"]["arguments"] if calls else message["content"]
        assert bool(calls) == ("tools" in more)
        assert [*json.loads(text)] == ["metres"]


def test_tenants_share_nothing_and_other_text_is_not_stored(
    reference: Reference, server: Server
) -> None:
    store = DirectoryStore(reference.folder / "openai")
    before, body = {*store.keys()}, asked(reference, 16)
    misses = []
    for tenant in ("a", "b", "a"):
        answer = answered(server, body, **{"x-tenant-id": tenant})
        misses.append(answer["blockattn"]["misses"])
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached == 0) == (misses[-1] > 0)
    passages = len(body["documents"])
    assert misses == [passages + 1, passages + 1, 0]
    assert len({*store.keys()} - before) == 2 * passages, "expected only passages to be stored"


def recognized(server: Server, body: dict[str, Any], hits: int, **headers: str) -> dict[str, Any]:
    """Repeat a chat until the index, which is read in the background, has its passages."""
    for _ in range(100):
        answer = answered(server, body, **headers)
        if answer["blockattn"].get("hits", 0) >= hits:
            break
        time.sleep(0.2)
    return answer


def test_tenants_only_recognize_their_own_passages(reference: Reference, server: Server) -> None:
    _, ingested, sent, *_, question = (text.strip() for text in reference.case(18).texts)
    server.client().encode([ingested])
    text = f"Context:\n<source>{ingested}</source>\n<source>{sent}</source>\n{question}"
    plain = {"messages": [{"role": "user", "content": text}], **GREEDY}
    first = recognized(server, plain, 1)
    assert (first["blockattn"]["hits"], first["blockattn"]["misses"]) == (1, 1)
    answered(server, {**plain, "documents": [{"text": sent}]})
    second = recognized(server, plain, 3)
    assert (second["blockattn"]["hits"], second["blockattn"]["misses"]) == (3, 1)
    assert answered(server, plain)["blockattn"]["misses"] == 0
    impossible = answered(server, {**plain, "prompt_logprobs": 1})["blockattn"]
    assert impossible["mode"] == "full"
    assert "prompt_logprobs is not supported in block mode" in impossible["reason"]
    # Tenant "e" recognizes no passages until its index has been read.
    tenant = {"x-tenant-id": "e"}
    own = reference.case(19).texts[1].strip()
    chat = {"messages": [{"role": "user", "content": f"<source>{own}</source>\n{question}"}]}
    answered(server, {**chat, **GREEDY, "documents": [{"text": own}]}, **tenant)
    assert recognized(server, {**chat, **GREEDY}, 1, **tenant)["blockattn"]["mode"] == "block"
    other = answered(server, plain, **tenant)
    assert other["blockattn"] == {"mode": "full"}
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_sources_of_a_front_end_are_reused_in_the_next_turn(server: Server, name: str) -> None:
    tenant = {"x-tenant-id": re.sub(r"\W+", "-", name)}
    first, second = ({"messages": messages, **GREEDY} for messages in FRONT_ENDS[name])
    reports = [answered(server, body, **tenant)["blockattn"] for body in (first, second, second)]
    assert [report["hits"] + report["misses"] for report in reports] == [4, 4, 4]
    assert (reports[0]["hits"], reports[2]["misses"]) == (0, 0)
    assert reports[1]["misses"] in (1, 2, 3)  # the new source, and possibly head and delimiters


def test_documents_are_refused_with_media_fields(server: Server) -> None:
    part = {"type": "text", "text": "How tall?", "image_url": "x"}
    body = {"messages": [{"role": "user", "content": [part]}], "documents": [{"text": "One."}]}
    response = server.post(CHATS, body)
    assert response.status_code == 400, response.text
    assert "media field, such as image_url, but prompts" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS, ENCODE])
def test_a_body_that_is_too_long_is_refused(server: Server, path: str) -> None:
    response = server.post(path, {"messages": [], "unknown": [1] * 5_000_000})
    assert response.status_code == 400, response.text
    assert "larger than 4,325,376 bytes" in response.json()["error"]["message"]
    assert server.http.get("/health").is_success


JUNK: list[Any] = [
    *(None, True, -1, 0, 10**30, 1e308, "", "x", "\u0000", [], {}, [[]], [None], {"": {}}),
    *(["x"] * 3, {"type": "x"}, [{"type": "text"}], {"role": "user"}, "<|end|>", "\ud800"),
]
FIELDS = [*ChatCompletionRequest.model_fields, "blockattn", "unknown"]


def _malformed(reference: Reference, seed: int) -> dict[str, Any]:
    """Return a valid body, with or without passages, with some fields replaced by junk."""
    choose = random.Random(seed)
    body = asked(reference, 17, max_tokens=2)
    if choose.random() < 0.5:
        del body["documents"]
    for field in choose.sample(FIELDS, choose.choice((1, 1, 2))):
        body[field] = choose.choice(JUNK)
    if choose.random() < 0.3:
        message = {"role": "user", "content": "x"}
        message[choose.choice(("role", "content", "tool_calls", "name"))] = choose.choice(JUNK)
        body["messages"] = [message, {"role": "user", "content": "x"}]
    return body


def test_no_malformed_body_causes_an_internal_error(reference: Reference, server: Server) -> None:
    for seed in range(400):
        body = _malformed(reference, seed)
        content = json.dumps({"model": NAME, **body})
        response = server.http.post(
            CHATS, content=content, headers={"Content-Type": "application/json"}
        )
        assert response.status_code in (200, 400, 404), (response.text, content)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"]
            assert "Traceback" not in response.text
            assert error["code"] == response.status_code
    assert said(answered(server, asked(reference, 17)))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b'"x"', b"\xff", b'{"messages": NaN}', b"1" * 5000]
)
def test_a_body_that_is_not_an_object_is_refused(server: Server, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = server.http.post(CHATS, content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
