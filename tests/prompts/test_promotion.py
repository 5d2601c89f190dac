"""Which passages move to the final block."""

from __future__ import annotations

from blockattn_rag.prompts.blocks import Block, Span, promoted

HEAD = Block.of([Span("You answer.", "system")])
A, B, C = Block("first"), Block("second"), Block("third")
CONTEXT = [HEAD, A, B, C]
ATTENTION = [0.6, 0.1, 0.2, 0.05]


def test_nothing_is_promoted_unless_asked_for() -> None:
    assert promoted(CONTEXT, ATTENTION, 0) == (CONTEXT, [])


def test_the_most_attended_passages_move_and_the_best_comes_last() -> None:
    assert promoted(CONTEXT, ATTENTION, 1) == ([HEAD, A, C], [B])
    assert promoted(CONTEXT, ATTENTION, 2) == ([HEAD, C], [A, B])


def test_of_equal_passages_the_first_is_the_best() -> None:
    assert promoted(CONTEXT, [0.0] * 4, 2) == ([HEAD, C], [B, A])


def test_more_than_there_are_is_all_of_them_and_only_passages_move() -> None:
    assert promoted(CONTEXT, ATTENTION, 9) == ([HEAD], [C, A, B])
    assert promoted([HEAD], [1.0], 1) == ([HEAD], [])


def test_of_a_passage_that_comes_twice_the_place_with_more_attention_moves() -> None:
    assert promoted([A, B, A], [0.1, 0.2, 0.7], 1) == ([A, B], [A])
