"""Grammars in decoding: each row is held to its own, and only to that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockattn_rag.errors import GrammarError
from blockattn_rag.model.constraint import GrammarConstraint, restricted
from blockattn_rag.output.compiler import GrammarCompiler, Matcher
from blockattn_rag.output.grammar import parse_grammar
from tests.models import tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer()
END = TOKENIZER.eos_token_id
A, B, C = TOKENIZER.convert_tokens_to_ids(["a", "b", "c"])
PAD = TOKENIZER.convert_tokens_to_ids("z")
WIDTH = len(TOKENIZER) + 7  # models predict more tokens than there are


@pytest.fixture
def matcher() -> Matcher:
    """Of an answer that is ``ab`` or ``ac``."""
    asked = parse_grammar(None, {"choice": ["ab", "ac"]})
    assert asked is not None
    return GrammarCompiler(TOKENIZER, [END], "tiny").matcher(asked)


def left(scores: torch.Tensor) -> list[set[int]]:
    """Tokens of each row that can be chosen."""
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in scores]


def test_each_row_is_held_to_its_own_grammar(matcher: Matcher) -> None:
    scores = torch.randn(3, WIDTH)
    found = restricted(scores, [[], [A], []], [matcher, matcher.fresh(), None], {END})
    assert left(found) == [{A}, {B, C}, set(range(WIDTH))]
    assert torch.equal(found[2], scores[2])
    assert torch.equal(found[1, [B, C]], scores[1, [B, C]])


def test_rows_that_have_ended_stay_unchanged(matcher: Matcher) -> None:
    scores = torch.randn(3, WIDTH)
    rows = [[A, B, END, C], [A, C, PAD], [A, PAD, PAD]]  # the last two end at stop strings
    matchers = [matcher, matcher.fresh(), matcher.fresh()]
    assert torch.equal(restricted(scores, rows, matchers, {END}, pad=PAD), scores)
    ended = restricted(scores[:1], [[A, B]], [matcher.fresh()], {B})  # by a letter of the grammar
    assert torch.equal(ended, scores[:1])


@pytest.mark.parametrize("row", [[C], [A, A], [PAD, A], [A, PAD, B], [C, PAD]])
def test_a_forbidden_token_is_an_error(matcher: Matcher, row: list[int]) -> None:
    scores = torch.randn(1, WIDTH)
    with pytest.raises(GrammarError, match="one that its grammar forbids"):
        restricted(scores, [row], [matcher], {END}, pad=PAD)
    given_up = restricted(scores, [row], [matcher], {END}, pad=PAD, has_strays=True)
    assert torch.equal(given_up, scores)


def test_an_error_of_the_grammar_is_raised_even_where_rows_are_given_up() -> None:
    cases = " | ".join(f"c{i}" for i in range(10_001))
    rules = "\n".join(f'c{i}: "x" "{i}"' for i in range(10_001))
    asked = parse_grammar(None, {"grammar": f'start: /a+/ "b" case\ncase: {cases}\n{rules}'})
    assert asked is not None
    large = GrammarCompiler(TOKENIZER, [END], "tiny").matcher(asked)
    with pytest.raises(GrammarError, match="max is 10000"):
        restricted(torch.zeros(1, WIDTH), [[A, A, B]], [large], {END}, has_strays=True)


def test_a_finished_answer_is_checked_once_more(matcher: Matcher) -> None:
    constraint = GrammarConstraint([matcher, None], 0, {END}, pad=PAD, has_strays=True)
    for answer in ([A], [A, B, END], [A, C, END, C], [A, C, PAD]):
        constraint.check_answer(answer)
    constraint.check_answer([C], 1)
    for answer in ([C], [A, A, END]):
        with pytest.raises(GrammarError, match="one that its grammar forbids"):
            constraint.check_answer(answer)


def test_a_complete_answer_ends_whatever_other_settings_forbid(matcher: Matcher) -> None:
    scores = torch.zeros(1, WIDTH)
    scores[0, END] = -torch.inf  # as min_new_tokens has it
    assert left(restricted(scores, [[A, B]], [matcher], {END})) == [{END}]


def test_settings_that_leave_no_token_are_an_error(matcher: Matcher) -> None:
    scores = torch.zeros(1, WIDTH)
    scores[0, A] = -torch.inf
    with pytest.raises(GrammarError, match="No token is left"):
        restricted(scores, [[]], [matcher], {END})


def test_the_prompt_is_no_part_of_the_answer(matcher: Matcher) -> None:
    constraint = GrammarConstraint([matcher], 2, {END})
    assert left(constraint(torch.tensor([[C, C, A]]), torch.zeros(1, WIDTH))) == [{B, C}]


def test_beams_have_matchers_of_their_own_and_may_trade_places(matcher: Matcher) -> None:
    constraint = GrammarConstraint([matcher, None], 1, {END}, has_strays=True)
    every = set(range(WIDTH))
    first = torch.tensor([[C, A, B], [C, A, C], [C, C, C], [C, B, B]])
    found = left(constraint(first, torch.zeros(4, WIDTH)))
    assert found == [{END}, {END}, every, every]
    traded = torch.tensor([[C, A], [C, A], [C, C], [C, B]])
    assert left(constraint(traded, torch.zeros(4, WIDTH))) == [{B, C}, {B, C}, every, every]
