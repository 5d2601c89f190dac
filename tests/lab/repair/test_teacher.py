"""Full mode's answers, and the files that keep them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.lab.repair.divergence import log_probs_at
from blockattn_rag.lab.repair.teacher import Teacher
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import CHAT
from tests.lab.repair.runs import PASSAGES, PROMPT, block_model
from tests.models import tiny_tokenizer

# Of unequal lengths, so that batches have padding.
PROMPTS = [CHAT.prompt(f"{n}?" * n, PASSAGES[:n], tiny_tokenizer()) for n in (1, 2, 5)]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return block_model()


@pytest.fixture
def answered(model: BlockModel, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many prompts were computed."""
    counts: list[int] = []
    compute = Teacher._compute

    def counted(teacher: Teacher, batch: Any) -> Any:
        counts.append(len(batch))
        return compute(teacher, batch)

    monkeypatch.setattr(Teacher, "_compute", counted)
    return lambda: sum(counts)


def silent(done: int, total: int) -> None: ...


def test_answers_are_those_of_full_mode_with_its_predictions(
    model: BlockModel, tmp_path: Path
) -> None:
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
        # float32 logits of about 10, computed in batches and alone
        torch.testing.assert_close(log_probs, log_probs_at(logits, tokens), rtol=0, atol=1e-4)
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(len(expected)))


def test_an_answer_ends_with_its_end_token_though_its_batch_goes_on(
    model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher(model, tmp_path, 6, 8)
    teacher.answer_all(PROMPTS, silent)
    answers = [teacher(prompt).ids.tolist() for prompt in PROMPTS]
    end = next(token for token in answers[0][:-1] if not all(token in ids for ids in answers))
    monkeypatch.setitem(vars(model), "end_token_ids", {end})
    again = Teacher(model, tmp_path / "ends", 6, 8)
    again.answer_all(PROMPTS, silent)
    for prompt, whole in zip(PROMPTS, answers, strict=True):
        length = whole.index(end) + 1 if end in whole else 6
        cut = again(prompt)
        assert cut.ids.tolist() == whole[:length]
        assert len(cut.predictions.tokens) == length


def test_what_was_answered_before_is_not_computed_again(
    model: BlockModel, tmp_path: Path, answered: Callable[[], int]
) -> None:
    Teacher(model, tmp_path, 4, 8).answer_all(PROMPTS[:2], silent)
    told: list[tuple[int, int]] = []
    teacher = Teacher(model, tmp_path, 4, 8)
    assert teacher.answer_all(PROMPTS, lambda *figures: told.append(figures)) == 1
    assert answered() == 3
    assert (told[0], told[-1]) == ((2, 3), (3, 3))
    teacher(PROMPTS[0])
    assert answered() == 3


def test_other_settings_have_answers_of_their_own(
    model: BlockModel, tmp_path: Path, answered: Callable[[], int]
) -> None:
    for number, (tokens, top_k) in enumerate([(4, 8), (5, 8), (4, 7)], 1):
        Teacher(model, tmp_path, tokens, top_k)(PROMPT)
        assert answered() == number


def test_a_damaged_file_is_computed_again(
    model: BlockModel, tmp_path: Path, answered: Callable[[], int]
) -> None:
    teacher = Teacher(model, tmp_path, 4, 8)
    expected = teacher(PROMPT)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    assert teacher.answer_all([PROMPT], silent) == 1
    torch.testing.assert_close(teacher(PROMPT), expected)
    assert answered() == 2


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_computed(
    model: BlockModel, tmp_path: Path, answered: Callable[[], int]
) -> None:
    teacher = Teacher(model, tmp_path, 4000, 8)
    with pytest.raises(ContextOverflowError, match=r"of 4000 do not fit in .* 4096"):
        teacher.answer_all(PROMPTS, silent)
    assert answered() == 0
