"""Recognition of sources that chat front ends mark in the text of messages."""

from __future__ import annotations

import pytest

from blockattn_rag.prompts.blocks import Origin, Span, text_of
from blockattn_rag.prompts.recognition import MOST_PASSAGES
from blockattn_rag.prompts.sources import marked_sources

A, B = "Halden Tower is 214 metres tall.", "Tove Lake is\n31 metres deep."


def passages(text: str, origin: Origin = "conversation") -> list[str]:
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
    ],
)
def test_text_between_delimiters_is_a_passage(text: str, expected: list[str]) -> None:
    assert passages(text) == expected


def test_only_text_of_messages_is_searched() -> None:
    text = f'<source id="1">{A}</source>'
    assert passages(text, "conversation") == passages(text, "system") == [A]
    others: tuple[Origin, ...] = ("template", "answer", "passage", "altered")
    kept = [Span(text, origin) for origin in others]
    assert marked_sources(kept) == tuple(kept)


def test_sources_do_not_span_messages() -> None:
    spans = (Span(f'<source id="1">{A}', "system"), Span("</source>", "conversation"))
    assert marked_sources(spans) == spans


def test_the_number_of_passages_is_limited() -> None:
    text = "".join(f'<source id="{n}">{A}</source>' for n in range(MOST_PASSAGES + 9))
    spans = marked_sources([Span(B, "passage"), Span(text, "conversation")])
    assert sum(span.origin == "passage" for span in spans) == MOST_PASSAGES
    assert text_of(spans) == B + text


def test_unclosed_delimiters_take_linear_time() -> None:
    """A search from every delimiter would take hours."""
    text = '<source id="1">[CONTEXT 1]:\n' * 100_000
    assert passages(text) == []
