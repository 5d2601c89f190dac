"""Answers as text and calls: in one piece or in many, well-formed or not."""

from __future__ import annotations

import random
import re
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.output import FORMATS, ReadAnswer, ToolCallParser, parse_answer

Read = tuple[str, list[tuple[str, dict[str, Any]]], list[tuple[str | None, str]]]


def plain(answer: ReadAnswer) -> Read:
    calls = [(one.name, one.arguments) for one in answer.calls]
    return answer.text, calls, [(one.name, one.text) for one in answer.invalid]


def read(form: str, answer: str) -> Read:
    """The answer as text, calls, and malformed calls; the same in whatever pieces it comes."""
    whole = plain(parse_answer(answer, FORMATS[form], ["look_up"]))
    draw = random.Random(len(answer))
    for most in (1, 1, 3, 8):
        parser, pieces, at = ToolCallParser(FORMATS[form], ["look_up"]), [], 0
        while at < len(answer):
            size = draw.randint(1, most)
            pieces += parser.push(answer[at : at + size])
            at += size
        assert plain(ReadAnswer.of([*pieces, *parser.finish()])) == whole
    return whole


CALL = ("look_up", {"q": "a"})
WELL_FORMED = {
    "hermes": [
        '<tool_call>\n{"name": "look_up", "arguments": {"q": "a"}}\n</tool_call>',
        '<tool_call>{"arguments":{"q":"a"},"name":"look_up","id":"x"}</tool_call>\n',
        '<tool_call>\n[{"name": "look_up", "arguments": {"q": "a"}}]\n</tool_call>',
        '<tool_call>\n{"name": "look_up", "arguments": {"q": "a"}}',  # a stop string ended it
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
    ("form", "answer"), [(form, one) for form, all_ in WELL_FORMED.items() for one in all_]
)
def test_a_call_is_read_in_each_form(form: str, answer: str) -> None:
    assert read(form, answer) == ("", [CALL], [])


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "look_up", "arguments": {"q": "a"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        ),
        (
            "llama3",
            '{"name": "look_up", "parameters": {"q": "a"}}; {"name": "other", "parameters": {}}',
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "look_up", "arguments": {"q": "a"}}, '
            '{"name": "other", "arguments": {}}]',
        ),
        ("mistral_args", '[TOOL_CALLS]look_up[ARGS]{"q": "a"}[TOOL_CALLS]other[ARGS]{}'),
        (
            "granite",
            '<|tool_call|>[{"name": "look_up", "arguments": {"q": "a"}}, '
            '{"name": "other", "arguments": {}}]',
        ),
    ],
)
def test_parallel_calls_are_read_in_their_order(form: str, answer: str) -> None:
    assert read(form, answer) == ("", [CALL, ("other", {})], [])


def test_ids_that_a_model_writes_are_kept_and_others_are_made() -> None:
    with_id = parse_answer(WELL_FORMED["mistral"][0], FORMATS["mistral"]).calls[0]
    assert with_id.id == "a1B2c3D4e"
    with_id = parse_answer(WELL_FORMED["mistral_args"][1], FORMATS["mistral_args"]).calls[0]
    assert with_id.id == "a1B2c3D4e"
    made = {parse_answer(WELL_FORMED["hermes"][0], FORMATS["hermes"]).calls[0].id for _ in "12"}
    assert len(made) == 2
    assert all(len(one) == 9 and one.isalnum() for one in made)


def test_an_object_is_a_call_without_an_opening_only_where_the_answer_begins() -> None:
    call = WELL_FORMED["llama3"][0]
    assert read("llama3", f"{call} Then?") == ("Then?", [CALL], [])
    assert read("llama3", f"It is {call}") == (f"It is {call}", [], [])
    assert read("llama3", f"I see.<|python_tag|>{call}") == ("I see.", [CALL], [])


@pytest.mark.parametrize("answer", [' {"answer": 3} is it', "[1]", '{"name": "Bob"', "{", " x{"])
def test_an_answer_that_happens_to_be_an_object_is_text(answer: str) -> None:
    assert read("llama3", answer) == (answer, [], [])


MALFORMED = [
    ("hermes", "<tool_call>\nlook_up(q='a')\n</tool_call>", None, "Expecting value"),
    ("hermes", "<tool_call></tool_call>", None, "Expecting value"),
    ("hermes", '<tool_call>{"name": "look_up"}</tool_call>', "look_up", "expected 'arguments'"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None, "expected a tool's 'name'"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, "found 3"),
    (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": "{}"}</tool_call>',
        "look_up",
        "to be a JSON object, found a string",
    ),
    (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": {}, "q": "a"}</tool_call>',
        "look_up",
        "found unknown fields 'q'",
    ),
    (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": {"q": 1, "q": 2}}</tool_call>',
        "look_up",
        "the key 'q' twice",
    ),
    (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": {"q": NaN}}</tool_call>',
        "look_up",
        "NaN",
    ),
    (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": {"q": "\\ud83d"}}</tool_call>',
        "look_up",
        "'\\ud83d', half of a surrogate pair",
    ),
    (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": {"q": -1e999}}</tool_call>',
        "look_up",
        "found -1e999, which is too large",
    ),
    ("hermes", '<tool_call>{"name": "look_up", "argum', "look_up", "ends before the call does"),
    ("hermes", "<tool_call>[]</tool_call>", None, "expected a JSON object, found a list"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", None, "recursion"),
    ("llama3", '{"name": "look_up", "q": "a"}', "look_up", "expected 'parameters' or 'arguments'"),
    ("llama3", '{"name": "look_up", "parameters": {"q', "look_up", "ends before the call does"),
    ("llama3", "<|python_tag|>brave_search.call(query='a')", None, "expected JSON"),
    ("mistral", "[TOOL_CALLS] none", None, "expected JSON"),
    ("mistral_args", '[TOOL_CALLS]look_up{"q": "a"}', None, "expected a tool's name and JSON"),
    ("mistral_args", '[TOOL_CALLS]look_up[ARGS]{"q": ', "look_up", "ends before the call does"),
    ("mistral_args", "[TOOL_CALLS]look_up[ARGS][1]", "look_up", "found a list"),
    ("granite", '<|tool_call|>[{"name": "look_up"}]', "look_up", "expected 'arguments'"),
    ("granite", "<|tool_call|>", None, "expected JSON"),
]


@pytest.mark.parametrize(("form", "answer", "name", "error"), MALFORMED)
def test_reports_malformed_calls(form: str, answer: str, name: str | None, error: str) -> None:
    read(form, answer[:500])
    found = parse_answer(answer, FORMATS[form], ["look_up"])
    assert not found.text
    assert not found.calls
    (one,) = found.invalid
    assert error in one.error
    assert one.name == name
    bare = answer.replace(FORMATS[form].opening, "").replace("</tool_call>", "").strip()
    assert one.text == bare


def test_a_malformed_call_takes_no_other_call_with_it() -> None:
    good = '<tool_call>\n{"name": "look_up", "arguments": {"q": "a"}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "look_up", "arguments": {"q": "a}}\n</tool_call>'
    text, calls, invalid = read("hermes", f"One {bad}\n{good} two")
    assert (text, calls) == ("One two", [CALL])
    assert invalid == [("look_up", '{"name": "look_up", "arguments": {"q": "a}}')]
    listed = '[TOOL_CALLS][{"name": "look_up", "arguments": {"q": "a"}}, {"name": "look_up"}]'
    assert read("mistral", listed) == ("", [CALL], [("look_up", '{"name": "look_up"}')])
    lines = '<tool_call>\n{"name": "look_up", "arguments": {"q": "a\nb"}}\n</tool_call>'
    text, calls, ((_, shown),) = read("hermes", f"One {lines}\n{good} two")
    assert (text, calls, f"<tool_call>\n{shown}\n</tool_call>") == ("One two", [CALL], lines)
    listed = '[TOOL_CALLS][{"name": "look_up", "arguments": {"q": "a\nb"}}] two'
    assert read("mistral", listed)[0] == "two"
    apart = '[TOOL_CALLS]oops[TOOL_CALLS]look_up[ARGS]{"q": "a"}'
    assert read("mistral_args", apart) == ("", [CALL], [(None, "oops")])


@pytest.mark.parametrize("q", ["</tool_call>", '\\"}]', "}{;", "<|python_tag|>", "[ARGS]", "\\n"])
@pytest.mark.parametrize("form", FORMATS)
def test_marks_and_brackets_in_arguments_are_part_of_these(form: str, q: str) -> None:
    answer = WELL_FORMED[form][0].replace('"a"', f'"{q}"')
    _, ((_, arguments),), invalid = read(form, answer)
    assert not invalid
    assert arguments == {"q": q.replace("\\n", "\n").replace('\\"', '"')}


PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "look_up", "arguments": {"q": "'],
    "llama3": ["<|python_tag|>", ";", '{"name": "look_up", "parameters": {"q": "', '{"a": 1}'],
    "mistral": ["[TOOL_CALLS]", "]", '[{"name": "look_up", "arguments": {"q": "'],
    "mistral_args": ["[TOOL_CALLS]", "look_up", "[ARGS]", "[CALL_ID]", '{"q": "'],
    "granite": ["<|tool_call|>", "]", '[{"name": "look_up", "arguments": {"q": "'],
}
ANY_FORM = ['"', '"}}', "{", "}", "[", "\\", "\n", " ", "a", "[TOOL", "<"]


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
def test_an_answer_is_read_the_same_wherever_it_is_cut(form: str, data: st.DataObject) -> None:
    read(form, "".join(data.draw(st.lists(st.sampled_from(PIECES[form] + ANY_FORM), max_size=12))))


Pieces = list[tuple[str, bool]]
"""Texts of tokens, and whether each is a token of its own."""


def spans_of(pieces: Pieces) -> list[tuple[int, int]]:
    ends = [*accumulate(len(text) for text, _ in pieces)]
    return [
        (end - len(text), end)
        for end, (text, is_token) in zip(ends, pieces, strict=True)
        if is_token
    ]


def as_tokens(form: str, answer: str) -> Pieces:
    """An answer cut at its marks, which are tokens."""
    marks = "|".join(map(re.escape, FORMATS[form].marks))
    return [(text, text in FORMATS[form].marks) for text in re.split(f"({marks})", answer) if text]


def read_tokens(form: str, pieces: Pieces) -> Read:
    """``read`` where the tokenizer has the marks; whole, and token by token."""
    marks, names = FORMATS[form].marks, ["look_up"]
    text = "".join(text for text, _ in pieces)
    whole = plain(parse_answer(text, FORMATS[form], names, tokens=marks, marks=spans_of(pieces)))
    parser, found = ToolCallParser(FORMATS[form], names, marks), []
    for one in pieces:
        for part in [one] if one[1] else [(character, False) for character in one[0]]:
            found += parser.push(part[0], spans_of([part]))
    assert plain(ReadAnswer.of([*found, *parser.finish()])) == whole
    return whole


@pytest.mark.parametrize(
    ("form", "answer"), [(form, one) for form, all_ in WELL_FORMED.items() for one in all_]
)
def test_marks_that_are_tokens_count_and_the_same_characters_do_not(form: str, answer: str) -> None:
    assert read_tokens(form, as_tokens(form, answer)) == ("", [CALL], [])
    if FORMATS[form].opening in answer:
        assert read_tokens(form, [(answer, False)]) == (answer, [], [])
    quoted = [(f"It says {answer}.", False), *as_tokens(form, answer)]
    if FORMATS[form].opening in answer:
        assert read_tokens(form, quoted) == (quoted[0][0], [CALL], [])


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
def test_tokens_of_any_order_give_what_they_spell(form: str, data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.sampled_from(PIECES[form] + ANY_FORM), max_size=12))
    marks = FORMATS[form].marks
    drawn = data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts)))
    pieces = [(t, t in marks and one) for t, one in zip(texts, drawn, strict=True)]
    text, calls, invalid = read_tokens(form, pieces)
    if not any(is_token for _, is_token in pieces) and not FORMATS[form].is_bare:
        assert (text, calls, invalid) == ("".join(texts), [], [])
    shown = "".join([text, *(one for _, one in invalid), *(name for name, _ in calls)])
    assert not re.search("[\ud800-\udfff]", shown)


def test_text_cannot_spell_a_mark_by_characters_that_stand_for_it() -> None:
    parser = ToolCallParser(FORMATS["hermes"], (), FORMATS["hermes"].marks)
    body = '{"name": "look_up", "arguments": {}}'
    assert parser.push(f"\udc00{body}\udc01") == [f"\ufffd{body}\ufffd"]


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_that_begins_with_text_is_all_text_if_a_grammar_chose(form: str) -> None:
    for answer in (f"Well. {WELL_FORMED[form][0]}", "  \n", "Well.", FORMATS[form].opening[:-1]):
        parser, found = ToolCallParser(FORMATS[form], only_first=True), []
        for character in answer:
            found += parser.push(character)
        assert plain(ReadAnswer.of([*found, *parser.finish()])) == (answer, [], [])
        parser = ToolCallParser(FORMATS[form], only_first=True)
        whole = [*parser.push(answer), *parser.finish()]
        assert plain(ReadAnswer.of(whole)) == (answer, [], [])
    if FORMATS[form].is_bare:
        parser, answer = ToolCallParser(FORMATS[form], only_first=True), f'{{"a": 1}} {answer}>'
        whole = [*parser.push(f"{answer}{WELL_FORMED[form][-1]}"), *parser.finish()]
        assert plain(ReadAnswer.of(whole)) == (f"{answer}{WELL_FORMED[form][-1]}", [], [])
    parser = ToolCallParser(FORMATS[form], only_first=True)
    call = f" {WELL_FORMED[form][0]}"
    assert plain(ReadAnswer.of([*parser.push(call), *parser.finish()])) == ("", [CALL], [])


class Counted(str):
    """A text of which so many characters may be copied or searched."""

    __slots__ = ()
    left = 0

    @classmethod
    def note(cls, characters: int) -> None:
        cls.left -= characters
        assert cls.left >= 0

    def __add__(self, other: str) -> Counted:
        return Counted(str(self) + str(other))

    def __radd__(self, other: str) -> Counted:
        return Counted(str(other) + str(self))

    def __getitem__(self, key: Any) -> Counted:
        part = super().__getitem__(key)
        self.note(len(part))
        return Counted(part)

    def find(self, sought: str, start: Any = 0, end: Any = None) -> int:
        at = super().find(sought, start, end)
        self.note((len(self) if at < 0 else at) - start)
        return at

    def partition(self, sought: str) -> tuple[str, str, str]:
        self.note(len(self))
        before, mark, after = super().partition(sought)
        return Counted(before), mark, Counted(after)


LONG = "a" * 200_000


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("mistral_args", f"[TOOL_CALLS]{LONG}"),
        ("mistral_args", f'[TOOL_CALLS]look_up[ARGS]{{"q": "{LONG}"}}'),
        ("mistral_args", f"[TOOL_CALLS]x{{{LONG}"),
        ("mistral_args", "[TOOL_CALLS]x" * 15_000),
        ("mistral", f"[TOOL_CALLS] none {LONG}"),
        ("hermes", f"<tool_call>{LONG}</tool_call>"),
        ("granite", f"<|tool_call|>{' ' * 200_000}[]"),
    ],
)
@pytest.mark.parametrize("size", [7, 1 << 20])
def test_parsing_takes_linear_time(form: str, answer: str, size: int) -> None:
    Counted.left = 10 * len(answer)
    parser = ToolCallParser(FORMATS[form], ["look_up"])
    for at in range(0, len(answer), size):
        parser.push(Counted(answer[at : at + size]))
    parser.finish()


def test_blanks_are_no_name_of_a_tool() -> None:
    assert read("mistral_args", "[TOOL_CALLS] [ARGS]a") == ("", [], [(None, "[ARGS]a")])


def test_text_comes_out_at_once_and_a_call_when_it_is_whole() -> None:
    parser = ToolCallParser(FORMATS["hermes"])
    assert parser.push("I look") == ["I look"]
    assert parser.push(" up.\n<tool") == [" up."]
    assert parser.push('_call>\n{"name": "f", "arguments": {') == []
    (call,) = parser.push("}}\n</tool_call>")
    assert not isinstance(call, str)
    assert parser.finish() == []
