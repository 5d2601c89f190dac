"""The teacher: answers of full mode, their cache files, and the divergence loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.lab.repair.teacher import (
    Teacher,
    TopPredictions,
    answer_loss,
    divergence,
    log_probs_at,
    top_predictions,
)
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import CHAT
from tests.lab.repair.runs import PASSAGES, PROMPT, block_model
from tests.models import tiny_tokenizer
from tests.recording import recorded

# Different lengths, so that batches contain padding.
PROMPTS = [CHAT.prompt(f"{n}?" * n, PASSAGES[:n], tiny_tokenizer()) for n in (1, 2, 5)]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return block_model()


@pytest.fixture
def answered(model: BlockModel, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Function that returns how many prompts were computed."""
    calls = recorded(monkeypatch, Teacher, "compute")
    return lambda: sum(len(call.args[1]) for call in calls)


def silent(done: int, total: int) -> None: ...


def test_answers_equal_full_mode(model: BlockModel, tmp_path: Path) -> None:
    teacher = Teacher(model, tmp_path, 6, 8)
    assert teacher.answer_all(PROMPTS, silent) == 3
    engine = BlockAttentionEngine(model)
    for prompt in PROMPTS:
        ids, (tokens, log_probs) = teacher(prompt)
        expected = engine.generate(prompt, mode="full", max_new_tokens=6).token_ids
        assert ids.tolist() == expected
        logits = engine.answer_logits(prompt, expected, mode="full")
        assert tokens.shape == (len(expected), 8)
        assert tokens[:, 0].tolist() == expected  # greedy
        # float32 logits of about 10, computed in a batch and individually.
        torch.testing.assert_close(log_probs, log_probs_at(logits, tokens), rtol=0, atol=1e-4)
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(len(expected)))


def test_an_answer_ends_at_its_end_token_while_the_batch_continues(
    model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher(model, tmp_path, 6, 8)
    teacher.answer_all(PROMPTS, silent)
    answers = [teacher(prompt).ids.tolist() for prompt in PROMPTS]
    end = next(token for token in answers[0][:-1] if not all(token in ids for ids in answers))
    monkeypatch.setattr(model.hf_model.generation_config, "eos_token_id", end)
    again = Teacher(model, tmp_path / "ends", 6, 8)
    again.answer_all(PROMPTS, silent)
    for prompt, whole in zip(PROMPTS, answers, strict=True):
        length = whole.index(end) + 1 if end in whole else 6
        cut = again(prompt)
        assert cut.ids.tolist() == whole[:length]
        assert len(cut.predictions.tokens) == length


def test_reuses_answers(model: BlockModel, tmp_path: Path, answered: Callable[[], int]) -> None:
    Teacher(model, tmp_path, 4, 8).answer_all(PROMPTS[:2], silent)
    seen: list[tuple[int, int]] = []
    teacher = Teacher(model, tmp_path, 4, 8)
    assert teacher.answer_all(PROMPTS, lambda *figures: seen.append(figures)) == 1
    assert answered() == 3
    assert (seen[0], seen[-1]) == ((2, 3), (3, 3))
    teacher(PROMPTS[0])
    assert answered() == 3


def test_answers_of_other_settings_are_not_reused(
    model: BlockModel, tmp_path: Path, answered: Callable[[], int]
) -> None:
    for number, (tokens, top_k) in enumerate([(4, 8), (5, 8), (4, 7)], 1):
        Teacher(model, tmp_path, tokens, top_k)(PROMPT)
        assert answered() == number


def test_damaged_answers_are_recomputed(
    model: BlockModel, tmp_path: Path, answered: Callable[[], int]
) -> None:
    teacher = Teacher(model, tmp_path, 4, 8)
    expected = teacher(PROMPT)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    assert teacher.answer_all([PROMPT], silent) == 1
    torch.testing.assert_close(teacher(PROMPT), expected)
    assert answered() == 2


def test_prompts_that_are_too_long_are_refused(
    model: BlockModel, tmp_path: Path, answered: Callable[[], int]
) -> None:
    teacher = Teacher(model, tmp_path, 4000, 8)
    with pytest.raises(ContextOverflowError, match=r"of 4000 tokens does not fit in .* 4096"):
        teacher.answer_all(PROMPTS, silent)
    assert answered() == 0


def logits_of(*probabilities: list[float]) -> torch.Tensor:
    # A constant offset does not change probabilities.
    return torch.tensor(probabilities).log() + 3.5


def random_logits(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_the_top_tokens_are_kept_and_all_others_are_merged() -> None:
    found = top_predictions(logits_of([0.1, 0.5, 0.05, 0.3, 0.05]), 2)
    assert found.tokens.tolist() == [[1, 3]]
    torch.testing.assert_close(found.log_probs.exp(), torch.tensor([[0.5, 0.3, 0.2]]))
    # At least one token is merged.
    assert top_predictions(random_logits(3, 5, 0), 64).log_probs.shape == (3, 5)


def test_tiny_probabilities_of_merged_tokens_are_exact() -> None:
    logits = torch.tensor([[40.0, 0.0, 0.0]])
    rest = top_predictions(logits, 1).log_probs[0, 1]
    assert rest.item() == pytest.approx(math.log(2) - 40, rel=1e-6)


def test_the_divergence_matches_its_formula() -> None:
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


def test_fewer_top_tokens_give_a_lower_bound_of_the_divergence() -> None:
    teacher, student = random_logits(5, 20, 2), random_logits(5, 20, 3)
    whole = F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    by_count = [divergence(top_predictions(teacher, k), student) for k in (19, 5, 1)]
    torch.testing.assert_close(by_count[0], whole)
    assert (by_count[1] <= whole + 1e-5).all()
    assert (by_count[2] <= by_count[1] + 1e-5).all()
    assert (by_count[2] < whole).any()


def test_the_first_token_counts_twice() -> None:
    first, second, third = per_token = torch.tensor([0.4, 0.1, 0.3])
    found = answer_loss(per_token)
    assert found.item() == pytest.approx((2 * first + second + third).item() / 4, rel=1e-5)


def test_a_teacher_with_probability_one_gives_finite_gradients() -> None:
    teacher = top_predictions(torch.tensor([[60.0, 0.0, 0.0, 0.0]]), 2)
    student = torch.tensor([[-60.0, 90.0, 0.0, 0.0]], requires_grad=True)
    divergence(teacher, student).sum().backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert student.grad.isfinite().all()
