"""Parsing of answers into text and tool calls: complete or streamed, valid or malformed."""

from __future__ import annotations

import random
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.output import FORMATS, CallParser, ReadAnswer, ToolCall, parse_answer
from blockattn_rag.output.answers import ThoughtReader
from blockattn_rag.output.tool_parser import AnswerReader
from blockattn_rag.prompts.blocks import BlockPrompt, text_of
from tests.models import marked_tokenizer, tiny_tokenizer

Read = tuple[str, list[tuple[str, dict[str, Any]]], list[tuple[str | None, str]]]
BASE: Any = tiny_tokenizer()
SIZES = (1, 3, 8, 1000)


def plain(answer: ReadAnswer) -> Read:
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.text, calls, [(call.name, call.text) for call in answer.invalid]


def reader_of(parser: CallParser) -> AnswerReader:
    thoughts = ThoughtReader(SimpleNamespace(chat_template=""), BlockPrompt((), "?"))
    return AnswerReader(thoughts, parser)


def streamed(parser: CallParser, text: str, chunks: list[tuple[str, list[int]]]) -> Read:
    """Read a streamed answer, and check that text emitted early is a prefix of the final text."""
    reader = reader_of(parser)
    shown = "".join(reader.push(*chunk).answer for chunk in chunks)
    said, answer = reader.finish(text, [token for _, ids in chunks for token in ids])
    assert shown + said.answer == answer.text
    return plain(answer)


def read(form: str, answer: str, **options: Any) -> Read:
    """Return text, calls and malformed calls, after checking that streams give the same result."""
    parser = CallParser(FORMATS[form], ["look_up"], **options)
    whole = plain(parser.parse(answer))
    draw = random.Random(len(answer))
    for most in SIZES:
        at, chunks = 0, list[tuple[str, list[int]]]()
        while at < len(answer):
            size = draw.randint(1, most)
            chunks.append((answer[at : at + size], []))
            at += size
        assert streamed(parser, answer, chunks) == whole
    return whole


CALL = ("look_up", {"q": "a"})
WELL_FORMED = {
    "hermes": [
        '<tool_call>\n{"name": "look_up", "arguments": {"q": "a"}}\n</tool_call>',
        '<tool_call>{"arguments":{"q":"a"},"name":"look_up","id":"x"}</tool_call>\n',
        '<tool_call>\n[{"name": "look_up", "arguments": {"q": "a"}}]\n</tool_call>',
        '<tool_call>\n{"name": "look_up", "arguments": {"q": "a"}}',  # ended by a stop string
    ],
    "llama3": [
        '{"name": "look_up", "parameters": {"q": "a"}}',
        '\n{"type": "function", "name": "look_up", "parameters": {"q": "a"}}',
        '{"name": "look_up", "arguments": {"q": "a"}}',
        '<|python_tag|>{"name": "look_up", "parameters": {"q": "a"}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "look_up", "arguments": {"q": "a"}, "id": "a1B2c3D4e"}]',
        '[TOOL_CALLS][{"name": "look_up", "arguments": {"q": "a"}}]',
    ],
    "mistral_args": [
        '[TOOL_CALLS]look_up[ARGS]{"q": "a"}',
        '[TOOL_CALLS]look_up[CALL_ID]a1B2c3D4e[ARGS]{"q": "a"}',
        '[TOOL_CALLS][{"name": "look_up", "arguments": {"q": "a"}}]',
    ],
    "granite": ['<|tool_call|>[{"name": "look_up", "arguments": {"q": "a"}}]'],
}


@pytest.mark.parametrize(
    ("form", "answer"), [(form, answer) for form in WELL_FORMED for answer in WELL_FORMED[form]]
)
def test_a_call_is_parsed_in_each_format(form: str, answer: str) -> None:
    assert read(form, answer) == ("", [CALL], [])


OTHER = '{"name": "other", "arguments": {}}'


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("hermes", f"\n<tool_call>\n{OTHER}\n</tool_call>"),
        ("llama3", '; {"name": "other", "parameters": {}}'),
        ("mistral", f", {OTHER}]"),
        ("mistral_args", "[TOOL_CALLS]other[ARGS]{}"),
        ("granite", f", {OTHER}]"),
    ],
)
def test_parallel_calls_are_parsed_in_order(form: str, more: str) -> None:
    answer = WELL_FORMED[form][0].removesuffix("]") + more
    assert read(form, answer) == ("", [CALL, ("other", {})], [])


@pytest.mark.parametrize("form", ["hermes", "granite", "mistral"])
def test_written_calls_are_parsed_back_unchanged(form: str) -> None:
    calls = [ToolCall("look_up", {"q": 'ü "x"'}), ToolCall("other", {})]
    spans = FORMATS[form].written(calls)
    assert read(form, text_of(spans))[1] == [(call.name, call.arguments) for call in calls]
    assert all("look_up" not in span.text for span in spans if span.parses_control)


def test_ids_that_a_model_writes_are_kept_if_they_are_unique() -> None:
    for form, index in (("mistral", 0), ("mistral_args", 1)):
        (call,) = parse_answer(WELL_FORMED[form][index], FORMATS[form]).calls
        assert call.id == "a1B2c3D4e"
    first = WELL_FORMED["hermes"][1]
    same_id = first.replace('"q"', '"r"')
    kept, made = (call.id for call in parse_answer(first + same_id, FORMATS["hermes"]).calls)
    assert kept == "x" != made
    assert len(made) == 9
    assert made.isalnum()


def test_an_object_without_a_delimiter_is_only_a_call_at_the_start() -> None:
    call = WELL_FORMED["llama3"][0]
    assert read("llama3", f"{call} Then?") == ("Then?", [CALL], [])
    assert read("llama3", f"It is {call}") == (f"It is {call}", [], [])
    assert read("llama3", f"I see.<|python_tag|>{call}") == ("I see.", [CALL], [])


@pytest.mark.parametrize("answer", [' {"answer": 3} is it', "[1]", '{"name": "Bob"', "{", " x{"])
def test_an_answer_that_is_an_ordinary_object_is_text(answer: str) -> None:
    assert read("llama3", answer) == (answer, [], [])


MALFORMED_OBJECTS = [
    ("\nlook_up(q='a')\n", None, "Expecting value"),
    ("", None, "Expecting value"),
    ('{"name": "look_up"}', "look_up", "Expected 'arguments'"),
    ('{"arguments": {}}', None, "Expected a tool's 'name'"),
    ('{"name": 3, "arguments": {}}', None, "found 3"),
    ('{"name": "look_up", "arguments": "{}"}', "look_up", "to be a JSON object, found a string"),
    ('{"name": "look_up", "arguments": {}, "q": "a"}', "look_up", "Found unknown fields 'q'"),
    ('{"name": "look_up", "arguments": {"q": 1, "q": 2}}', "look_up", "the key 'q' twice"),
    ('{"name": "look_up", "arguments": {"q": NaN}}', "look_up", "NaN"),
    ('{"name": "look_up", "arguments": {"q": "\\ud83d"}}', "look_up", "is a lone surrogate"),
    ('{"name": "look_up", "arguments": {"q": -1e999}}', "look_up", "expected a finite"),
    ("[]", None, "Expected a JSON object, found a list"),
    ("[" * 100_000, None, "recursion"),
]
MALFORMED = [
    *(
        ("hermes", f"<tool_call>{text}</tool_call>", name, error)
        for text, name, error in MALFORMED_OBJECTS
    ),
    ("hermes", '<tool_call>{"name": "look_up", "argum', "look_up", "ends before the call does"),
    ("llama3", '{"name": "look_up", "q": "a"}', "look_up", "Expected 'parameters' or 'arguments'"),
    ("llama3", '{"name": "look_up", "parameters": {"q', "look_up", "ends before the call does"),
    ("llama3", "<|python_tag|>brave_search.call(query='a')", None, "Expected JSON"),
    ("mistral", "[TOOL_CALLS] none", None, "Expected JSON"),
    ("mistral_args", '[TOOL_CALLS]look_up{"q": "a"}', None, "Expected a tool's name and JSON"),
    ("mistral_args", '[TOOL_CALLS]look_up[ARGS]{"q": ', "look_up", "ends before the call does"),
    ("mistral_args", "[TOOL_CALLS]look_up[ARGS][1]", "look_up", "found a list"),
    ("granite", '<|tool_call|>[{"name": "look_up"}]', "look_up", "Expected 'arguments'"),
    ("granite", "<|tool_call|>", None, "Expected JSON"),
]


@pytest.mark.parametrize(("form", "answer", "name", "error"), MALFORMED)
def test_malformed_calls_are_reported(form: str, answer: str, name: str | None, error: str) -> None:
    read(form, answer[:500])
    bare = answer.replace(FORMATS[form].opening, "").replace("</tool_call>", "").strip()
    parsed = parse_answer(answer, FORMATS[form], ["look_up"])
    assert plain(parsed) == ("", [], [(name, bare)])
    assert error in parsed.invalid[0].error


def test_a_malformed_call_does_not_affect_other_calls() -> None:
    good = '<tool_call>\n{"name": "look_up", "arguments": {"q": "a"}}\n</tool_call>'
    for q in ('"a', '"a\nb"', '"a" b'):
        bad = f'{{"name": "look_up", "arguments": {{"q": {q}}}}}'
        answer = f"One <tool_call>\n{bad}\n</tool_call>\n{good} two"
        assert read("hermes", answer) == ("One two", [CALL], [("look_up", bad)])
    extra = read("hermes", good.replace("}}", "}} done"))[2]
    assert extra == [("look_up", '{"name": "look_up", "arguments": {"q": "a"}} done')]
    listed = '[TOOL_CALLS][{"name": "look_up", "arguments": {"q": "a"}}, {"name": "look_up"}] two'
    assert read("mistral", listed) == ("two", [CALL], [("look_up", '{"name": "look_up"}')])
    apart = '[TOOL_CALLS]oops[TOOL_CALLS]look_up[ARGS]{"q": "a"}'
    assert read("mistral_args", apart) == ("", [CALL], [(None, "oops")])
    assert read("mistral_args", "[TOOL_CALLS] [ARGS]a") == ("", [], [(None, "[ARGS]a")])


@pytest.mark.parametrize("q", ["</tool_call>", '\\"}]', "}{;", "<|python_tag|>", "[ARGS]", "\\n"])
@pytest.mark.parametrize("form", FORMATS)
def test_delimiters_and_brackets_in_arguments_are_text(form: str, q: str) -> None:
    answer = WELL_FORMED[form][0].replace('"a"', f'"{q}"')
    _, ((_, arguments),), invalid = read(form, answer)
    assert not invalid
    assert arguments == {"q": q.replace("\\n", "\n").replace('\\"', '"')}


ADD, NUMBER = (f'{{"name": "add", "arguments": {x}}}' for x in ('{"a": 1}', '{"a": true}'))


def test_an_answer_ends_at_a_call_that_repeats_the_previous_one() -> None:
    tagged, other = (f"<tool_call>{call}</tool_call>" for call in (ADD, NUMBER))
    made = [("add", {"a": 1})]
    assert read("hermes", f"So: {tagged}\n{tagged} x {other}") == ("So:", made, [])
    assert read("hermes", f"{tagged}{tagged[:30]}")[1] == made  # cut off, and so not equal
    assert read("hermes", f"{tagged} and {tagged}") == ("and", made * 2, [])
    assert len(read("hermes", tagged + other)[1]) == 2  # 1 and true differ
    bad = '<tool_call>{"name": "add"}</tool_call>'
    assert read("hermes", bad * 3) == ("", [], [("add", '{"name": "add"}')])


@pytest.mark.parametrize("form", ["mistral", "granite"])
def test_a_list_ends_at_a_repeated_call_even_if_it_is_cut_off(form: str) -> None:
    answer = f"{FORMATS[form].opening}[{ADD}, {NUMBER}, {NUMBER}, {NUMBER[:20]}"
    assert read(form, answer) == ("", [("add", {"a": 1}), ("add", {"a": True})], [])
    cut = f"{FORMATS[form].opening}[{ADD}, {NUMBER[:20]}"
    assert not read(form, cut)[1]


def test_only_the_first_valid_call_is_used_if_one_is_allowed() -> None:
    bad, tagged = '<tool_call>{"name": "add"}</tool_call>', f"<tool_call>{ADD}</tool_call>"
    answer = f"So: {bad} {tagged} and {tagged.replace('1', '2')} done"
    expected = "So:", [("add", {"a": 1})], [("add", '{"name": "add"}')]
    assert read("hermes", answer, parallel=False) == expected


@pytest.mark.parametrize("form", FORMATS)
def test_with_a_grammar_an_answer_that_begins_with_text_is_all_text(form: str) -> None:
    call = WELL_FORMED[form][0]
    for answer in (f"Well. {call}", "  \n", "Well.", FORMATS[form].opening[:-1]):
        assert read(form, answer, only_first=True) == (answer, [], [])
    if FORMATS[form].is_bare:
        answer = f'{{"a": 1}} {{"a": 2}}>{WELL_FORMED[form][-1]}'
        assert read(form, answer, only_first=True) == (answer, [], [])
    assert read(form, f" {call}", only_first=True) == ("", [CALL], [])


PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "look_up", "arguments": {"q": "'],
    "llama3": ["<|python_tag|>", ";", '{"name": "look_up", "parameters": {"q": "', '{"a": 1}'],
    "mistral": ["[TOOL_CALLS]", "]", '[{"name": "look_up", "arguments": {"q": "'],
    "mistral_args": ["[TOOL_CALLS]", "look_up", "[ARGS]", "[CALL_ID]", '{"q": "'],
    "granite": ["<|tool_call|>", "]", '[{"name": "look_up", "arguments": {"q": "'],
}
ANY_FORM = ['"', '"}}', "{", "}", "[", "\\", "\n", " ", "a", "é", "[TOOL", "<"]


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
def test_streaming_gives_the_same_result_for_any_answer(form: str, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from(PIECES[form] + ANY_FORM), max_size=12))
    only_first, parallel = data.draw(st.tuples(st.booleans(), st.booleans()))
    read(form, "".join(pieces), only_first=only_first, parallel=parallel)


Pieces = list[tuple[str, bool]]
"""Texts, and whether each is a single token."""


def as_tokens(form: str, answer: str) -> Pieces:
    """Split an answer at its delimiters, which are tokens."""
    marks = "|".join(map(re.escape, FORMATS[form].marks))
    return [(text, text in FORMATS[form].marks) for text in re.split(f"({marks})", answer) if text]


def read_tokens(form: str, pieces: Pieces, *, special: bool) -> Read:
    """Like ``read``, for delimiters that are tokens."""
    tokenizer = marked_tokenizer(FORMATS[form].marks, special=special)
    ids: list[int] = []
    for text, is_token in pieces:
        encode = tokenizer if is_token else BASE
        ids += encode(text, add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    parser = CallParser(FORMATS[form], ["look_up"], tokenizer)
    whole = plain(parser.parse(text, ids))
    for size in SIZES:
        chunks, shown = [], 0
        for at in range(0, len(ids), size):
            new = tokenizer.decode(ids[: at + size], skip_special_tokens=True).rstrip("\ufffd")
            chunks.append((new[shown:], ids[at : at + size]))
            shown = max(shown, len(new))
        assert streamed(parser, text, chunks) == whole
    return whole


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("form", "answer"), [(form, answer) for form in WELL_FORMED for answer in WELL_FORMED[form]]
)
def test_only_special_tokens_are_delimiters(form: str, answer: str, special: bool) -> None:
    made = as_tokens(form, answer)
    assert read_tokens(form, made, special=special) == ("", [CALL], [])
    if FORMATS[form].opening in answer:
        assert read_tokens(form, [(answer, False)], special=special) == (answer, [], [])
        quoted = f"É says {answer}."
        pieces = [(quoted, False), *made, (f"\n{quoted}", False)]
        if FORMATS[form].closing and FORMATS[form].closing not in answer:
            return  # the call is not closed
        assert read_tokens(form, pieces, special=special) == (quoted * 2, [CALL], [])


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
def test_streaming_gives_the_same_result_for_any_tokens(
    form: str, special: bool, data: st.DataObject
) -> None:
    texts = data.draw(st.lists(st.sampled_from(PIECES[form] + ANY_FORM), max_size=12))
    drawn = data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts)))
    pieces = [(t, t in FORMATS[form].marks and one) for t, one in zip(texts, drawn, strict=True)]
    text, calls, invalid = read_tokens(form, pieces, special=special)
    if not any(is_token for _, is_token in pieces) and not FORMATS[form].is_bare:
        assert (text, calls, invalid) == ("".join(texts), [], [])


def test_delimiters_after_a_stop_string_are_removed() -> None:
    tokenizer = marked_tokenizer(FORMATS["hermes"].marks, special=False)
    mark = tokenizer.convert_tokens_to_ids("<tool_call>")
    ids = [*BASE("So ", add_special_tokens=False)["input_ids"], mark]
    parser = CallParser(FORMATS["hermes"], (), tokenizer)
    assert plain(parser.parse("So ", ids)) == ("So ", [], [])


LONG = "a" * 200_000


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("mistral_args", f"[TOOL_CALLS]{LONG}"),
        ("mistral_args", f'[TOOL_CALLS]look_up[ARGS]{{"q": "{LONG}"}}'),
        ("mistral_args", "[TOOL_CALLS]x" * 15_000),
        ("mistral", f"[TOOL_CALLS] none {LONG}"),
        ("hermes", f"<tool_call>{LONG}</tool_call>"),
        ("hermes", '<tool_call>{"a": [' * 10_000),
        ("hermes", f"{'</tool_call>' * 10_000}<tool_call>{'</tool_call>' * 10_000}"),
        ("granite", f"<|tool_call|>{' ' * 200_000}[]"),
        ("llama3", '{"name": "look_up", "parameters": {}};' * 5_000),
    ],
)
def test_long_answers_are_parsed_quickly(form: str, answer: str) -> None:
    began = time.process_time()
    parse_answer(answer, FORMATS[form], ["look_up"])
    assert time.process_time() - began < 5  # takes 0.1 s on an idle core


def test_text_before_a_call_is_streamed_immediately() -> None:
    reader = reader_of(CallParser(FORMATS["hermes"]))
    pieces = ["I look", " up.\n<to", "ols> <tool", '_call>\n{"name": "f", "argum', 'ents": {}}']
    shown = [reader.push(piece, []).answer for piece in pieces]
    assert shown == ["I look", " up.", "\n<tools>", "", ""]
    said, answer = reader.finish("".join(pieces), [])
    assert (said.answer, [call.name for call in answer.calls]) == ("", ["f"])
