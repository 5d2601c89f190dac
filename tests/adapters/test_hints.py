"""Every missed opportunity for reuse is logged once as a hint."""

from __future__ import annotations

import logging

import pytest

from blockattn_rag.adapters.hints import ReuseHints
from blockattn_rag.prompts.blocks import BlockPrompt, Span
from blockattn_rag.prompts.markers import segment, wrap

LONG = "Context: " + "a passage that nobody marked. " * 20


def show(hints: ReuseHints, *prompts: str) -> None:
    for prompt in prompts:
        hints.look_at(segment(prompt))


@pytest.fixture
def hints(caplog: pytest.LogCaptureFixture) -> ReuseHints:
    caplog.set_level(logging.WARNING, "blockattn_rag")
    return ReuseHints()


def test_unmarked_passages_log_a_hint(hints: ReuseHints, caplog: pytest.LogCaptureFixture) -> None:
    show(hints, *[LONG] * 9)
    (record,) = caplog.records
    assert "BlockKVPostprocessor() last" in record.getMessage()
    assert "format_blocks" in record.getMessage()


def test_marked_prompts_log_no_hint(hints: ReuseHints, caplog: pytest.LogCaptureFixture) -> None:
    show(hints, *["What is meant?"] * 9, wrap("passage") + "Q", *[LONG] * 9)
    assert not caplog.records


def test_question_first_logs_hint(hints: ReuseHints, caplog: pytest.LogCaptureFixture) -> None:
    show(hints, *(f"Question {n}? {wrap('passage')}Answer:" for n in range(9)))
    (record,) = caplog.records
    assert "before the passages" in record.getMessage()


def test_alternating_heads_log_no_hint(hints: ReuseHints, caplog: pytest.LogCaptureFixture) -> None:
    show(hints, *(f"Template {n % 4}: {wrap('passage')}Question {n}?" for n in range(12)))
    assert not caplog.records


def test_a_constant_head_logs_no_hint(hints: ReuseHints, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(9):
        hints.look_at(segment(f"Context: {wrap('passage')}Question {number}?"))
        spans = [Span(f"Date {number}", "system"), Span("passage", "passage"), Span("Q", "prompt")]
        hints.look_at(BlockPrompt.from_spans(spans))
    assert not caplog.records
