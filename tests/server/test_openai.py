"""Requests of OpenAI clients: conversion to block prompts, and reports in the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.errors import ProtocolError
from blockattn_rag.prompts.blocks import IN_MEMORY, PRIVATE, STORED, BlockPrompt
from blockattn_rag.prompts.formats import BLANK_LINE, CHAT, Passage
from blockattn_rag.prompts.markers import segment, wrap
from blockattn_rag.prompts.recognition import PassageMatcher, entries_of
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.server.plan import BlockPlan, ServedBlocks
from blockattn_rag.server.protocol import MOST_BLOCKS
from blockattn_rag.server.vllm.answers import ChatReport, Ticket
from blockattn_rag.server.vllm.bodies import ChatBody, CompletionBody
from blockattn_rag.server.vllm.openai import Prompts, TokenPrompt
from tests.models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = Prompts(TOKENIZER)
END = 257  # <|end|>
DOCUMENTS = [{"title": "Halden", "text": "214 metres."}, {"text": " Tove {Halden} <|end|>"}]
QUESTION = "How tall is {it}?"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


def prompt_of(messages: list[Any], **fields: Any) -> BlockPrompt:
    body = ChatBody.from_dict({"messages": messages, **fields})
    return PROMPTS.chat(body, [], {})


def rendered(value: Any, prompts: Prompts = PROMPTS) -> TokenPrompt:
    body = ChatBody.from_dict(value)
    return prompts.token_ids(prompts.chat(body, [], {}), body.options.mode)


def test_documents_give_the_same_blocks_as_a_prompt_in_process() -> None:
    passages = [Passage(one.get("title", ""), one["text"]) for one in DOCUMENTS]
    expected = BlockTokenizer(TOKENIZER).prompt_ids(CHAT.prompt(QUESTION, passages, TOKENIZER))
    body = {"messages": [user(QUESTION)], "documents": DOCUMENTS}
    found = rendered(body)
    lengths = tuple(len(ids) for ids in expected.context)
    assert found.token_ids == expected.flat
    assert found[1:] == (lengths, (IN_MEMORY, STORED, STORED), ())
    full = rendered({**body, "blockattn": {"mode": "full"}})
    assert full == TokenPrompt(expected.flat)


def test_completions_give_the_same_tokens_as_a_prompt_in_process() -> None:
    body = CompletionBody.from_dict(
        {"prompt": f"A <|end|> {wrap('One.')} B", "documents": DOCUMENTS}
    )
    found = PROMPTS.token_ids(PROMPTS.completion(body), body.options.mode)
    texts = ["title: Halden\n\n214 metres.", "Tove {Halden} <|end|>"]
    marked = segment("".join(map(wrap, texts)) + f"A <|end|> {wrap('One.')} B", BLANK_LINE)
    expected = BlockTokenizer(TOKENIZER).prompt_ids(marked)
    assert found.token_ids == expected.flat
    assert found.lengths == tuple(map(len, expected.context))
    assert END not in found.token_ids
    assert [*found.keep] == [STORED, STORED, PRIVATE, STORED]
    assert found.fixed == (2,)  # not a passage, so never recomputed
    assert body.passages == [*texts, "One."]


@pytest.mark.parametrize("prompt", [None, 5, ["a", "b"], [1, 2]])
def test_a_completion_prompt_must_be_one_string(prompt: Any) -> None:
    with pytest.raises(ProtocolError, match="prompt should be a string"):
        CompletionBody.from_dict({"prompt": prompt, "documents": DOCUMENTS})


@pytest.mark.parametrize("promote", [1, 2])
def test_promoted_documents_are_part_of_the_final_block(promote: int) -> None:
    body = {"messages": [user(QUESTION)], "documents": DOCUMENTS}
    found, plain = rendered(body, Prompts(TOKENIZER, promote)), rendered(body)
    assert found.token_ids == plain.token_ids
    assert found.lengths == plain.lengths[:-promote]
    assert found.keep == plain.keep[:-promote]


def test_a_conversation_follows_the_documents_of_its_first_question() -> None:
    system = {"role": "system", "content": "Be brief."}
    turns = [user("Who?"), {"role": "assistant", "content": "Tove."}, user("Why?")]
    prompt = prompt_of([system, *turns], documents=DOCUMENTS)
    assert [block.text for block in prompt.context] == [
        f"<|begin|><|system|>\nBe brief.<|end|>\n<|user|>\n{CHAT.before}",
        "title: Halden\n\n214 metres.",
        "Tove {Halden} <|end|>",
    ]
    asked = CHAT.after.format(question="Who?")
    ends = "<|end|>\n<|assistant|>\nTove.<|end|>\n<|user|>\nWhy?<|end|>\n<|assistant|>\n"
    assert prompt.final == asked + ends


@pytest.mark.parametrize("role", ["user", "system"])
def test_all_parts_of_a_message_except_the_last_are_passages(role: str) -> None:
    parts = {"role": role, "content": text("One.", " Two. ", "Three?")}
    prompt = prompt_of([parts, user("Four?")], blockattn={"parts": "passages"})
    head, *passages = prompt.context
    assert (head.text, head.is_passage) == (f"<|begin|><|{role}|>\n", False)
    assert [(one.text, one.is_passage) for one in passages] == [("One.", True), ("Two.", True)]
    assert prompt.final.startswith("Three?")


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (user(text("One.", "Two.")), {}),
        (user(text("One.")), {"parts": "passages"}),
        ({"role": "assistant", "content": text("One.", "Two.")}, {"parts": "passages"}),
        (user(text(" ", "Two.")), {"parts": "passages"}),
    ],
)
def test_other_texts_are_not_passages(message: Any, options: dict[str, str]) -> None:
    body = ChatBody.from_dict({"messages": [message], "blockattn": options})
    assert not body.passages


def test_marked_texts_are_passages_in_strings_and_parts() -> None:
    for content in (f"A {wrap('One.')} B", text(f"A {wrap('One.')} B"), text(wrap("One."), "B")):
        options = {"parts": "passages"} if len(content) == 2 else {}
        prompt = prompt_of([user(content)], blockattn=options)
        assert [block.text for block in prompt.context if block.is_passage] == ["One."]


def test_known_passages_are_recognized_in_plain_text() -> None:
    known = "Halden Tower is 214 metres tall."
    matcher = PassageMatcher(entries_of([known]))
    body = ChatBody.from_dict({"messages": [user(f"<source>{known}</source>\nWho?")]})
    prompt = PROMPTS.chat(body, [], {}, matcher.split)
    assert [block.text for block in prompt.context if block.is_passage] == [known]
    assert prompt.final.startswith("</source>\nWho?")
    assert not body.passages


def test_passages_that_an_earlier_answer_quotes_are_not_recognized() -> None:
    known = "Halden Tower is 214 metres tall."
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning_content }}{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
        "<|end|>{% endfor %}"
    )
    function = {"name": "f", "arguments": json.dumps({"text": known})}
    answer = {"role": "assistant", "content": f"They say: {known}", "reasoning": known}
    turns = [user(f"{known}\nWho?"), {**answer, "tool_calls": [{"id": "1", "function": function}]}]
    body = ChatBody.from_dict({"messages": [*turns, user("Why?")]})
    split = PassageMatcher(entries_of([known])).split
    prompt = Prompts(tokenizer).chat(body, [], {}, split)
    assert [block.text for block in prompt.context] == ["<|user|>", known]
    assert prompt.final.count(known) == 3


def test_tool_calls_and_results_are_rendered_as_in_process() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
        "<|{{ m.role }}|>{{ m.name }}{{ m.tool_call_id }}{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
        "<|end|>{% endfor %}{% if think %}<think>{% endif %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        user("Who?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": text("One.", "Two.")},
    ]
    body = ChatBody.from_dict({"messages": messages, "blockattn": {"parts": "passages"}})
    tools = [{"type": "function", "function": {"name": "f<|end|>"}}]
    prompts = Prompts(tokenizer)
    prompt = prompts.chat(body, tools, {"think": True, "unread": 1})
    assert prompt.text.startswith('{"type": "function", "function": {"name": "f<|end|>"}}<|user|>')
    assert '<|assistant|>{"a": [1]}<|end|><|tool|>fc1One.\n\nTwo.<|end|><think>' in prompt.text
    ids = prompts.token_ids(prompt, "block").token_ids
    assert ids.count(END) == 3


BAD: list[tuple[Any, str]] = [
    ([], "The body should be an object"),
    ({}, "messages should be a non-empty list, found None"),
    ({"messages": []}, "messages should be a non-empty list"),
    ({"messages": [{"content": "x"}]}, r"messages\[0\].role should be a string, found None"),
    ({"messages": [user([5])]}, r"content\[0\] should be an object, found 5"),
    ({"messages": [user([{"type": 1}])]}, r"content\[0\].type should be a string, found 1"),
    ({"messages": [user([{"type": "text"}])]}, r"content\[0\].text should be a string"),
    ({"messages": [user("x")] * 4097}, "has 4,097 messages and content parts, expected at most 4,"),
    ({"messages": [user(text("a") * 4096)]}, "has 4,097 messages and content parts"),
    ({"documents": [{"title": "x"}]}, r"documents\[0\] is missing the field 'text'"),
    ({"documents": [{"text": " "}]}, "The text is empty; remove empty documents"),
    ({"documents": [{"text": "x", "url": "y"}]}, "unknown field 'url'; remove it"),
    ({"documents": [{"text": "x"}] * (MOST_BLOCKS + 1)}, "at most 256 items"),
    ({"documents": [{"text": "\ud800"}]}, r"lone surrogate, \\ud800"),
    ({"blockattn": {"mode": "fast"}}, "blockattn.mode should be 'block' or 'full'"),
    ({"blockattn": {"part": "passages"}}, "unknown field 'part'"),
    ({"stream_interval": 10**30}, "an integer of 100 bits, expected at most 63"),
    ({"temperature": float("nan")}, "nan, which is not valid JSON"),
    ({"kv_transfer_params": {}}, "kv_transfer_params is not supported on this route"),
    ({"documents": DOCUMENTS, "messages": [{"role": "system", "content": "x"}]}, "role 'user'"),
    (
        {"documents": DOCUMENTS, "messages": [user([{"type": "image_url"}])]},
        "support only text; remove",
    ),
    ({"documents": DOCUMENTS, "messages": [user("x"), {"role": "<|x|>"}]}, "cannot be rendered"),
    (
        {"messages": [user(text(*"ab" * MOST_BLOCKS))], "blockattn": {"parts": "passages"}},
        "The prompt has 512 blocks, expected at most 256",
    ),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_malformed_bodies_are_refused_with_a_reason(body: Any, message: str) -> None:
    value = {"messages": [user("x")], **body} if isinstance(body, dict) and body else body
    with pytest.raises(ProtocolError, match=message):
        rendered(value)


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    nested: Any = "x"
    for _ in range(200):
        nested = [nested]
    with pytest.raises(ProtocolError, match="nested more than 100 levels"):
        ChatBody.from_dict({"messages": [user(nested)]})
    arguments = '{"a":' * 200 + "1" + "}" * 200
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(ProtocolError, match="nested more than 100 levels"):
        ChatBody.from_dict({"messages": [{"role": "assistant", "tool_calls": calls}]})


WORDS = st.sampled_from(
    ["text", "type", "role", "user", "content", "passages", "<|end|>", "\ud800"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
CALL = st.fixed_dictionaries(
    {}, optional={"id": JSON, "function": st.fixed_dictionaries({"name": JSON, "arguments": JSON})}
)
MESSAGE: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "tool", "assistant"]) | JSON},
    optional={
        "content": st.text(max_size=9) | JSON | st.lists(st.builds(dict, type=WORDS, text=JSON)),
        "tool_calls": st.lists(CALL, max_size=2) | JSON,
        "tool_call_id": JSON,
        "reasoning": JSON,
    },
)
BODY: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE | JSON, max_size=3) | JSON},
    optional={
        "documents": st.lists(st.builds(dict, text=st.text(max_size=9)), max_size=2) | JSON,
        "blockattn": st.builds(dict, parts=st.just("passages")) | JSON,
        "kv_transfer_params": st.none() | JSON,
    },
)


@settings(max_examples=400, deadline=None)
@given(BODY | JSON)
def test_invalid_bodies_only_raise_request_errors(value: Any) -> None:
    with suppress(ProtocolError):
        assert rendered(value).token_ids


SERVED = ServedBlocks(2, 10, 0, encoded=1, encoded_tokens=6, recomputed=[1, 0])
REPORT = {
    "mode": "block",
    "hits": 1,
    "misses": 1,
    "reused_tokens": 3,
    "computed_tokens": 12,
    "recipe": "head:4",
}


async def ensure_again() -> dict[str, int]:
    return {}


TICKET = Ticket(BlockPlan("complete", (4, 6)), ensure_again, prompt_tokens=15, served=SERVED)
RECIPE = RecipeOutline("head:4")


def test_the_report_replaces_internal_fields_of_the_answer() -> None:
    usage = {"prompt_tokens": 15, "prompt_tokens_details": {"cached_tokens": 12}}
    data = {"choices": [{}], "kv_transfer_params": SERVED.to_dict(), "usage": usage}
    answer = ChatReport(TICKET, RECIPE).answer(SimpleNamespace(model_dump=lambda: data))
    assert answer == {
        "choices": [{}],
        "blockattn": REPORT,
        "usage": {"prompt_tokens": 15, "prompt_tokens_details": {"cached_tokens": 5}},
    }


def test_the_report_explains_why_recognized_passages_are_not_reused() -> None:
    shaped = ChatReport(None, RECIPE, reason="the store is down")
    answer = shaped.answer(SimpleNamespace(model_dump=lambda: {"usage": {}}))
    assert answer["blockattn"] == {"mode": "full", "reason": "the store is down"}


def streamed(events: list[str], shaped: ChatReport) -> list[Any]:
    async def source() -> AsyncGenerator[str, None]:
        for event in events:
            yield event

    async def read() -> list[str]:
        return [event async for event in shaped.events(source())]

    found = asyncio.run(read())
    assert found.pop() == "data: [DONE]\n\n"
    return [json.loads(event.removeprefix("data: ")) for event in found]


def event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


@pytest.mark.parametrize("ticket", [TICKET, None])
def test_the_report_is_in_the_last_event_of_a_stream(ticket: Ticket | None) -> None:
    said = {"choices": [{"delta": {"content": '"finish_reason":"'}, "finish_reason": None}]}
    choices = [{"delta": {}, "finish_reason": "stop"}]
    end = {"choices": choices, "kv_transfer_params": SERVED.to_dict() if ticket else None}
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 12}}}
    newer = {**said, "kv_transfer_params": None}  # vLLM 0.33
    events = [event(said), event(newer), event(end), event(usage), "data: [DONE]\n\n"]
    first, second, *found = streamed(events, ChatReport(ticket, RECIPE))
    assert first == second == said
    assert found[0] == {"choices": choices, "blockattn": REPORT if ticket else {"mode": "full"}}
    assert found[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == (5 if ticket else 12)
