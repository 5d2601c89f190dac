"""The loss of repair against cases written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from blockattn_rag.lab.repair.divergence import (
    TopPredictions,
    answer_loss,
    divergence,
    top_predictions,
)


def logits_of(*probabilities: list[float]) -> torch.Tensor:
    # The constant changes no probability.
    return torch.tensor(probabilities).log() + 3.5


def random_logits(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_the_likeliest_tokens_are_kept_and_all_others_are_one() -> None:
    found = top_predictions(logits_of([0.1, 0.5, 0.05, 0.3, 0.05]), 2)
    assert found.tokens.tolist() == [[1, 3]]
    torch.testing.assert_close(found.log_probs.exp(), torch.tensor([[0.5, 0.3, 0.2]]))


def test_at_least_one_token_is_among_the_others() -> None:
    assert top_predictions(random_logits(3, 5, 0), 64).log_probs.shape == (3, 5)


def test_others_of_hardly_any_mass_are_exact() -> None:
    logits = torch.tensor([[40.0, 0.0, 0.0]])
    rest = top_predictions(logits, 1).log_probs[0, 1]
    assert rest.item() == pytest.approx(math.log(2) - 40, rel=1e-6)


def test_a_divergence_written_out() -> None:
    teacher = TopPredictions(torch.tensor([[1, 3]]), torch.tensor([[0.5, 0.3, 0.2]]).log())
    student = logits_of([0.2, 0.4, 0.1, 0.1, 0.2])
    expected = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.1) + 0.2 * math.log(0.2 / 0.5)
    assert divergence(teacher, student).item() == pytest.approx(expected, rel=1e-5)


def test_equal_predictions_have_no_divergence_and_no_gradient() -> None:
    logits = random_logits(4, 30, 1).requires_grad_()
    found = divergence(top_predictions(logits.detach(), 6), logits)
    found.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, torch.zeros(4), rtol=0, atol=1e-6)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros(4, 30), rtol=0, atol=1e-6)


def test_all_tokens_but_one_give_the_whole_divergence_and_fewer_give_no_more() -> None:
    teacher, student = random_logits(5, 20, 2), random_logits(5, 20, 3)
    whole = F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    by_count = [divergence(top_predictions(teacher, k), student) for k in (19, 5, 1)]
    torch.testing.assert_close(by_count[0], whole)
    assert (by_count[1] <= whole + 1e-5).all()
    assert (by_count[2] <= by_count[1] + 1e-5).all()
    assert (by_count[2] < whole).any()


def test_the_first_token_weighs_as_much_as_is_asked() -> None:
    first, second, third = per_token = torch.tensor([0.4, 0.1, 0.3])
    found = answer_loss(per_token, first_token_weight=2)
    assert found.item() == pytest.approx((2 * first + second + third).item() / 4, rel=1e-5)


def test_a_teacher_that_is_sure_gives_finite_gradients() -> None:
    teacher = top_predictions(torch.tensor([[60.0, 0.0, 0.0, 0.0]]), 2)
    student = torch.tensor([[-60.0, 90.0, 0.0, 0.0]], requires_grad=True)
    divergence(teacher, student).sum().backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert student.grad.isfinite().all()
