"""Prompts contain as many earlier turns as fit."""

from __future__ import annotations

from blockattn_rag.app.rag.ask import Turn, with_history

TURNS = [Turn("How high?", "214 metres."), Turn("And how old?", "95 years.")]


def test_a_question_without_history_is_unchanged() -> None:
    assert with_history("Why?", [], count=len, max_tokens=100) == "Why?"


def test_earlier_turns_precede_the_question_oldest_first() -> None:
    assert with_history("Why?", TURNS, count=len, max_tokens=100) == (
        "Earlier questions and answers:\nQ: How high?\nA: 214 metres.\nQ: And how old?\n"
        "A: 95 years.\n\nThis question: Why?"
    )


def test_the_oldest_turns_that_do_not_fit_are_dropped() -> None:
    newest = len("Q: And how old?\nA: 95 years.")
    assert "How high?" not in with_history("Why?", TURNS, count=len, max_tokens=newest)
    assert "And how old?" in with_history("Why?", TURNS, count=len, max_tokens=newest)
    assert with_history("Why?", TURNS, count=len, max_tokens=newest - 1) == "Why?"
