"""Constrained decoding: each row of a batch follows its own grammar."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockattn_rag.errors import GrammarError
from blockattn_rag.model.constraint import GrammarConstraint
from blockattn_rag.output.compiler import GrammarCompiler, Matcher
from blockattn_rag.output.grammar import parse_grammar
from tests.models import tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer()
END = TOKENIZER.eos_token_id
A, B, C = TOKENIZER.convert_tokens_to_ids(["a", "b", "c"])
PAD = TOKENIZER.convert_tokens_to_ids("z")
WIDTH = len(TOKENIZER) + 7  # as in models with more logits than tokens
EVERY = set(range(WIDTH))
COMPILER = GrammarCompiler(TOKENIZER, [END], "tiny")


def matcher(**outputs: Any) -> Matcher:
    """Return a matcher. Default: for an answer that is ``ab`` or ``ac``."""
    grammar = parse_grammar(None, outputs or {"choice": ["ab", "ac"]})
    assert grammar is not None
    return COMPILER.matcher(grammar)


def constrained(rows: list[list[int]], *matchers: Matcher | None, **options: Any) -> torch.Tensor:
    """Apply the constraint for these partial answers to ``scores``. Default: zeros."""
    scores = options.pop("scores", torch.zeros(len(rows), WIDTH))
    ends = options.pop("ends", {END})
    return GrammarConstraint(matchers, 0, ends, **options)(torch.tensor(rows).long(), scores)


def left(scores: torch.Tensor) -> list[set[int]]:
    """Return the allowed tokens of each row."""
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in scores]


def test_each_row_follows_its_own_grammar() -> None:
    scores = torch.randn(3, WIDTH)
    rows = [[A], [B], [C]]
    result = constrained(rows, matcher(), matcher(choice=["ba"]), None, scores=scores)
    assert left(result) == [{B, C}, {A}, EVERY]
    assert torch.equal(result[2], scores[2])
    assert torch.equal(result[0, [B, C]], scores[0, [B, C]])


def test_ended_rows_keep_their_scores() -> None:
    # The second and third rows ended at stop strings.
    rows = [[A, B, END, C], [A, C, PAD, PAD], [A, PAD, PAD, PAD]]
    assert left(constrained(rows, *[matcher() for _ in rows], pad=PAD)) == [EVERY] * 3
    # A letter of the grammar ended the row.
    assert left(constrained([[A, B]], matcher(), ends={B})) == [EVERY]


@pytest.mark.parametrize("row", [[C], [A, A], [PAD, A], [A, PAD, B], [C, PAD]])
def test_a_forbidden_token_raises_unless_the_row_is_discarded(row: list[int]) -> None:
    with pytest.raises(GrammarError, match="a token that its grammar forbids"):
        constrained([row], matcher(), pad=PAD)
    assert left(constrained([row], matcher(), pad=PAD, has_strays=True)) == [EVERY]


def test_a_failing_grammar_only_ends_its_own_row() -> None:
    cases = " | ".join(f"c{i}" for i in range(10_001))
    rules = "\n".join(f'c{i}: "x" "{i}"' for i in range(10_001))
    large = {"grammar": f'start: /a+/ "b" case\ncase: {cases}\n{rules}'}
    with pytest.raises(GrammarError, match="max is 10000"):
        constrained([[A, A, B]], matcher(**large), has_strays=True)
    failures: list[tuple[int, GrammarError]] = []
    constraint = GrammarConstraint(
        [matcher(choice=["aabb"]), matcher(**large)],
        0,
        {END},
        on_failure=lambda place, error: failures.append((place, error)),
    )
    for _ in range(2):
        assert left(constraint(torch.tensor([[A, A, B]] * 2), torch.zeros(2, WIDTH))) == [
            {B},
            EVERY,
        ]
    ((place, error),) = failures
    assert place == 1
    assert "max is 10000" in str(error)


def test_a_finished_answer_is_checked_again() -> None:
    constraint = GrammarConstraint([matcher(), None], 0, {END}, pad=PAD, has_strays=True)
    for answer in ([A], [A, B, END], [A, C, END, C], [A, C, PAD]):
        constraint.check_answer(answer)
    constraint.check_answer([C], 1)
    for answer in ([C], [A, A, END]):
        with pytest.raises(GrammarError, match="a token that its grammar forbids"):
            constraint.check_answer(answer)


def test_a_complete_answer_may_end_even_if_other_settings_forbid_it() -> None:
    scores = torch.zeros(1, WIDTH)
    scores[0, END] = -torch.inf  # as min_new_tokens does
    assert left(constrained([[A, B]], matcher(), scores=scores)) == [{END}]


def test_settings_that_leave_no_token_fail_the_row() -> None:
    scores = torch.zeros(1, WIDTH)
    scores[0, [B, C]] = -torch.inf
    with pytest.raises(GrammarError, match="No token is left"):
        constrained([[A]], matcher(), scores=scores)
    failures: list[int] = []
    result = constrained(
        [[A]], matcher(), scores=scores, on_failure=lambda place, _: failures.append(place)
    )
    assert failures == [0]
    assert left(result) == [EVERY - {B, C}]


def test_the_prompt_is_not_part_of_the_answer() -> None:
    constraint = GrammarConstraint([matcher()], 2, {END})
    assert left(constraint(torch.tensor([[C, C, A]]), torch.zeros(1, WIDTH))) == [{B, C}]


def test_beams_follow_the_grammar_of_their_prompt_and_may_be_reordered() -> None:
    constraint = GrammarConstraint([matcher(), None], 1, {END}, has_strays=True)
    first = torch.tensor([[C, A, B], [C, A, C], [C, C, C], [C, B, B]])
    assert left(constraint(first, torch.zeros(4, WIDTH))) == [{END}, {END}, EVERY, EVERY]
    traded = torch.tensor([[C, A], [C, A], [C, C], [C, B]])
    assert left(constraint(traded, torch.zeros(4, WIDTH))) == [{B, C}, {B, C}, EVERY, EVERY]
