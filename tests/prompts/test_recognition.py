"""Recognition of known passages, and of sources that chat front ends mark, in plain text."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.prompts.blocks import BlockPrompt, Origin, Span, text_of
from blockattn_rag.prompts.chat_template import chat_spans
from blockattn_rag.prompts.markers import content_spans, wrap
from blockattn_rag.prompts.recognition import (
    ENTRY,
    MOST_PASSAGES,
    WINDOW,
    PassageMatcher,
    entries_of,
    joined,
    marked_sources,
)
from tests.models import tiny_tokenizer

WORDS = [f"{a}{b}{c}" for a in "bdgklm" for b in "aeiou" for c in "nrst"]


def passage(seed: int, words: int = 30) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words)) + "."


A, B, C = (passage(seed) for seed in range(3))


def found(text: str, *passages: str) -> list[str]:
    spans = PassageMatcher(entries_of(passages)).split([Span(text, "conversation")])
    assert "".join(span.text for span in spans) == text
    return [span.text for span in spans if span.origin == "passage"]


@pytest.mark.parametrize(
    ("text", "passages", "expected"),
    [
        (f"Use this:\n\n{A}\n\n{B}\n\nQuestion?", [A, B, C], [A, B]),
        (A, [A], [A]),
        (f"{A} and then", [A], [A]),
        (f"before {A}", [A], [A]),
        (f"{B}{A}", [A, B], [B, A]),
        (f"{A}\n{A}\n{A}", [A], [A, A, A]),
        (f"x {A} y", [f"  {A}\n"], [A]),
        (f"- {A} {B}", [A, B, f"{A} {B}"], [f"{A} {B}"]),
        (f"{A} {B} {C}", [f"{A} {B}", f"{B} {C}"], [f"{A} {B}"]),
        (f"{A} {B} {C}", [f"{A} {B}", f"{B} {C}. "[:-3]], [f"{A} {B}"]),
        (A.replace(" ", "\r\n"), [A.replace(" ", "\n")], []),
        (A[:-1], [A], []),
        (f"{A[:-1]}s", [A[:-1]], []),
        (f"un{A}", [A], []),
        (f"{A[:-1]} is 3.75", [f"{A[:-1]} is 3"], []),
        (f"{A[:-1]} is 3,500", [f"{A[:-1]} is 3"], []),
        (f"at -5 {A}", [f"5 {A}"], []),
        (f"{A[:-1]}'s", [A[:-1]], []),
        (f"{A[:-1]}e\u0301", [f"{A[:-1]}e"], []),
        (f"{A[:-1]}. Next", [A[:-1]], [A[:-1]]),
        (f"日本語 {'漢字と🜁 ' * 20}終わり", ["漢字と🜁 " * 20], [("漢字と🜁 " * 20).strip()]),
        (f"\ud800{A}\udfff", [A], [A]),
        (A[: WINDOW - 1], [A[: WINDOW - 1]], []),
        (f"{'ab ' * 200}", ["ab " * 20], [("ab " * 20).strip()] * 10),
        ("", [A], []),
        ("short", [A], []),
        (A, [], []),
    ],
)
def test_known_passages_are_found(text: str, passages: list[str], expected: list[str]) -> None:
    assert found(text, *passages) == expected


def test_only_plain_text_is_searched() -> None:
    marked = content_spans(f"{wrap(B)} {A}", "conversation")
    spans = [Span(f"<|im_start|>{C}", "template"), *marked, Span(f"{C} {B}", "system")]
    matcher = PassageMatcher(entries_of([A, B, C]))
    assert matcher.split(spans) == (
        Span(f"<|im_start|>{C}", "template"),
        Span(B, "passage"),
        Span(" ", "conversation"),
        Span(A, "passage"),
        Span(f"{C} {B}", "system"),
    )


def test_system_messages_are_only_searched_on_request() -> None:
    spans = (Span(f"Never\n{A}", "system"), Span(f"{B} Why?", "conversation"))
    matcher = PassageMatcher(entries_of([A, B]))
    question = (Span(B, "passage"), Span(" Why?", "conversation"))
    assert matcher.split(spans) == (spans[0], *question)
    rules = (Span("Never\n", "system"), Span(A, "passage"))
    assert matcher.split(spans, in_system=True) == (*rules, *question)


@pytest.mark.parametrize("template", ["{{ m.content }}", "<{{ m.role }}>{{ m.content }}"])
@pytest.mark.parametrize("roles", ["user user", "user tool"])
def test_passages_across_two_messages_are_not_recognized(template: str, roles: str) -> None:
    tokenizer = tiny_tokenizer(chat=f"{{% for m in messages %}}{template}{{% endfor %}}")
    halves = zip(roles.split(), (f"{A} {B[:50]}", f"{B[50:]} {C}"), strict=True)
    spans = chat_spans(tokenizer, [{"role": role, "content": text} for role, text in halves])
    known = [A, B, f"{B[:50]}\n\n{B[50:]}", C]
    split = PassageMatcher(entries_of(known)).split(spans)
    assert text_of(split) == text_of(spans)
    assert [span.text for span in split if span.origin == "passage"] == [A, C]


def test_passages_without_letters_and_digits_are_not_recognized() -> None:
    rule = "-" * 40
    assert not len(entries_of([rule, "\U0001f600 " * 40, "_" * 99]))
    assert found(f"{rule * 9}\n{A}", f"-{rule}-", A) == [A]


def test_indexed_passages_without_letters_and_digits_are_ignored() -> None:
    """Earlier versions wrote these index entries."""
    entry = "207ab63e945e3f4b28407d06ac02d1b828000000d064d859af67e1e77cbea365393da212"
    spans = (Span("-" * 100, "conversation"),)
    entries = np.frombuffer(bytes.fromhex(entry), ENTRY)
    assert PassageMatcher(entries).split(spans) == spans


GRAPHEMES = [
    "e\u0301",
    "\U0001f468\u200d\U0001f469\u200d\U0001f466",  # a family
    "\U0001f1e9\U0001f1ea",  # a flag
    "\U0001f44d\U0001f3fd",
    "\u2764\ufe0f",
    "1\ufe0f\u20e3",
    "\u1112\u1161\u11ab",  # Hangul jamo
    "\u0915\u094d\u0937",  # a conjunct in Devanagari
    "\u0e01\u0e33",
    "\u0600!",
]


@pytest.mark.parametrize("grapheme", GRAPHEMES, ids=ascii)
def test_passages_are_not_cut_within_graphemes(grapheme: str) -> None:
    assert regex.findall(r"\X", grapheme) == [grapheme]
    for cut in range(1, len(grapheme)):
        for known in (f"{A} ({grapheme[:cut]}", f"{grapheme[cut:]}) {A}"):
            assert found(f"{A} ({grapheme}) {A}", known) == []
    assert found(f"{grapheme} {A} {grapheme}", A, f"{A} {grapheme}") == [f"{A} {grapheme}"]


@given(st.lists(st.sampled_from([*"".join(GRAPHEMES), *"a. \n"]), min_size=1, max_size=9))
def test_recognized_passages_consist_of_complete_graphemes(tail: list[str]) -> None:
    text = f"{A} {''.join(tail)}"
    ends = {match.end() for match in regex.finditer(r"\X", text)}
    for known in (text[:end] for end in range(len(A), len(text))):
        assert all(len(passage) in ends for passage in found(text, known))


@given(st.data())
def test_the_longest_passages_take_precedence(data: st.DataObject) -> None:
    """The result is compared with a separate search for each passage."""
    letters = st.text("ab ", min_size=WINDOW, max_size=WINDOW + 6).map(str.strip)
    passages = data.draw(st.lists(letters, max_size=6))
    others = st.text("ab .", max_size=9)
    parts = st.lists(st.sampled_from(passages) | others if passages else others, max_size=8)
    text = "".join(data.draw(parts))
    taken = [False] * len(text)
    expected = []
    longest = sorted({one for one in passages if len(one) >= WINDOW}, key=len, reverse=True)
    sizes = sorted({len(one) for one in longest}, reverse=True)
    for size in sizes:
        for at in range(len(text) - size + 1):
            end = at + size
            cuts = [(at > 0, at), (end < len(text), end)]
            in_word = any(
                inside and text[cut - 1].isalnum() and text[cut].isalnum() for inside, cut in cuts
            )
            if text[at:end] in longest and not any(taken[at:end]) and not in_word:
                taken[at:end] = [True] * size
                expected.append((at, text[at:end]))
    assert found(text, *passages) == [one for _, one in sorted(expected)]


def test_an_entry_with_a_wrong_handle_matches_nothing() -> None:
    entries = entries_of([A])
    entries["handle"][0, 0] ^= 1
    spans = (Span(A * 3, "conversation"),)
    assert PassageMatcher(entries).split(spans) == spans


def test_passages_with_the_same_middle_take_bounded_time() -> None:
    same = "a " * 100
    matcher = PassageMatcher(entries_of(f"{n:08} {same}{n:08}" for n in range(5_000)))
    spans = (Span(same * 200, "conversation"),)
    began = time.thread_time()
    assert matcher.split(spans) == spans
    assert time.thread_time() - began < 1


def test_the_number_of_recognized_blocks_is_limited() -> None:
    text = "\n".join(f"{n}: {A}" for n in range(MOST_PASSAGES + 20))
    spans = PassageMatcher(entries_of([A])).split([Span(text, "conversation")])
    prompt = BlockPrompt.from_spans(spans)
    assert sum(block.is_passage for block in prompt.context) == MOST_PASSAGES
    assert len(prompt.context) <= 256
    text = "".join(f'<source id="{n}">{A}</source>' for n in range(MOST_PASSAGES + 9))
    spans = marked_sources([Span(B, "passage"), Span(text, "conversation")])
    assert sum(span.origin == "passage" for span in spans) == MOST_PASSAGES
    assert text_of(spans) == B + text


def test_entries_are_merged_without_duplicates() -> None:
    entries = joined([entries_of([A, B]), entries_of([B, C, "short"])])
    assert len(entries) == 3
    assert len(joined([])) == len(entries_of([])) == 0


def sources(text: str, origin: Origin = "conversation") -> list[str]:
    spans = marked_sources([Span(text, origin)])
    assert text_of(spans) == text
    return [span.text for span in spans if span.origin == "passage"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'<source id="1" name="a.txt">{A}</source>\n<source id="1">{B}</source>', [A, B]),
        (f"[CONTEXT 0]:\n{A}\n[END CONTEXT 0]\n\n[CONTEXT 1]:\n{B}\n[END CONTEXT 1]\n\n", [A, B]),
        (f"<contextItem>\n  <![CDATA[{A}]]>\n  </contextItem>", [A]),
        (f'As in <source id="1">.\n<source id="2" name="b">{A}</source></source>', [A]),
        (f'<source id="1">{A} [CONTEXT 7]:\n{B}</source>', [f"{A} [CONTEXT 7]:\n{B}"]),
        (f'<source id="1">{A}\n[END CONTEXT 0]</source>', [f"{A}\n[END CONTEXT 0]"]),
        (f'<source id="1">{A}]]></contextItem>', []),
        (f'<source id="1"> \n</source>{A}</source>', []),
        (f'<source src="a.mp4">{A}</source> <source>{A}</source>', []),
        (f'{A}</source><source id="1">{B}', []),
        # A search from every mark would take hours.
        pytest.param('<source id="1">[CONTEXT 1]:\n' * 100_000, [], id="unclosed"),
    ],
)
def test_text_between_source_marks_is_a_passage(text: str, expected: list[str]) -> None:
    assert sources(text) == expected


def test_sources_are_only_found_in_user_tool_and_system_messages() -> None:
    text = f'<source id="1">{A}</source>'
    assert sources(text, "conversation") == sources(text, "system") == [A]
    others: tuple[Origin, ...] = ("template", "answer", "passage", "altered")
    kept = [Span(text, origin) for origin in others]
    assert marked_sources(kept) == tuple(kept)


def test_sources_do_not_span_messages() -> None:
    spans = (Span(f'<source id="1">{A}', "system"), Span("</source>", "conversation"))
    assert marked_sources(spans) == spans
