"""Promotion: its forms, and which passages move to the final block."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.prompts.blocks import Block, Span
from blockattn_rag.prompts.promotion import by_attention, check_promotion, promoted

HEAD = Block.of([Span("You answer.", "system")])
A, B, C = Block("first"), Block("second"), Block("third")
CONTEXT = [HEAD, A, B, C]


@pytest.mark.parametrize(
    ("given", "form"),
    [("none", "none"), (0, "none"), (2, "2"), ("2", "2"), ("last:1", "last:1")],
)
def test_a_known_form_is_taken(given: Any, form: str) -> None:
    assert check_promotion(given) == form


@pytest.mark.parametrize("given", ["", "0", "-1", "first:1", "attention", "last:0", True, 1.0, -2])
def test_any_other_form_is_refused_with_the_known_ones(given: Any) -> None:
    with pytest.raises(ValueError, match=r"promote must be 'none', a number.*found "):
        check_promotion(given)


def test_nothing_is_promoted_unless_asked_for() -> None:
    assert promoted(CONTEXT, "none") == (CONTEXT, [])


def test_the_first_passages_are_the_best_and_the_best_comes_last() -> None:
    assert promoted(CONTEXT, "1") == ([HEAD, B, C], [A])
    assert promoted(CONTEXT, "2") == ([HEAD, C], [B, A])


def test_the_last_passages_are_the_best_where_that_is_said() -> None:
    assert promoted(CONTEXT, "last:2") == ([HEAD, A], [B, C])


def test_attention_decides_where_that_is_said() -> None:
    masses = {HEAD.handle: 0.6, A.handle: 0.1, B.handle: 0.2, C.handle: 0.1}
    assert by_attention("attention:1")
    assert not by_attention("1")
    assert promoted(CONTEXT, "attention:1", masses) == ([HEAD, A, C], [B])
    assert promoted(CONTEXT, "attention:2", masses) == ([HEAD, C], [A, B])


def test_more_than_there_are_is_all_of_them_and_only_passages_move() -> None:
    assert promoted(CONTEXT, "9") == ([HEAD], [C, B, A])
    assert promoted([HEAD], "1") == ([HEAD], [])


def test_a_passage_that_comes_twice_moves_once_for_each_place() -> None:
    assert promoted([A, B, A], "1") == ([B, A], [A])
