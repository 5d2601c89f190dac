"""Plan of a repair: the numbers of prompts and steps that fit in the time limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blockattn_rag.errors import DataError


class TooLittleTimeError(DataError):
    """The time limit is too short for a repair."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a repair. They are not options: measured speeds determine the numbers within them.

    Args:
        questions: Maximum number of questions that the model generates. More improve little.
        writing_share: Maximum fraction of the time for generating questions.
        passages: Maximum number of passages in a prompt: as many as ``ask`` retrieves.
        answer_tokens: Maximum number of tokens in full mode's answers. Enough for short facts.
        top_k: Number of the teacher's most likely tokens to keep at each answer token.
        held_out: Maximum number of questions for choosing and measuring together.
        held_out_share: Maximum fraction of questions that are held out.
        fewest_held_out: Minimum number of held-out questions: two for choosing and two for
            measuring, because a standard error requires two.
        fewest_to_choose: Minimum number of questions for choosing another recipe than the one in
            use or, without one, an adapter or a recipe that is faster than the stock recipe.
        closed_form: Maximum number of prompts for the closed form. More do not improve it.
        samples: Maximum number of prompts to train on.
        draws: Maximum number of samples per question, each with randomly drawn passages.
        fewest_samples: Minimum number of prompts to train on. With fewer, training is skipped.
        epochs: Passes over the samples. New samples improve results more than further passes.
        measurements: Number of evaluations during training. A checkpoint is saved with each.
        validation: Maximum number of prompts for evaluations during training.
        store_bytes: Maximum size of keys and values in the work folder, in bytes.
    """

    questions: int = 240
    writing_share: float = 0.2
    passages: int = 5
    answer_tokens: int = 24
    top_k: int = 64
    held_out: int = 64
    held_out_share: float = 0.25
    fewest_held_out: int = 4
    fewest_to_choose: int = 8
    closed_form: int = 40
    samples: int = 480
    draws: int = 4
    fewest_samples: int = 16
    epochs: float = 1.5
    measurements: int = 4
    validation: int = 12
    store_bytes: int = 8 << 30


LIMITS = Limits()

_FEWEST_CLOSED = 2
"""Minimum number of prompts for the closed form."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds per prompt for each step, measured before planning.

    Args:
        answer: Generating full mode's answer.
        encode: Encoding the context with full attention. Encoding the passages takes about as long.
        fetch: Loading the passages' blocks, or encoding the passages with the sink.
        step: Forward and backward pass of the student.
    """

    answer: float
    encode: float
    fetch: float
    step: float

    @property
    def compare(self) -> float:
        """Seconds for a recipe's predictions on a prompt, estimated as half a step."""
        return self.step / 2

    def held_out(self, recipes: int) -> float:
        """Seconds for a held-out prompt: full mode's answer, passages encoded with and without the
        sink, all recipes' predictions, and their answers (estimated as two predictions)."""
        return self.answer + self.encode + self.fetch + (recipes + 2) * self.compare

    def sample(self, epochs: float) -> float:
        return self.answer + self.fetch + epochs * self.step

    @property
    def closed_form(self) -> float:
        """Seconds for a closed-form prompt: its passages, and its context with full attention."""
        return 2 * self.encode

    def longer(self, factor: float) -> Speeds:
        decoding = max(0.0, self.answer - self.encode)
        return Speeds(
            answer=factor * min(self.answer, self.encode) + decoding,
            encode=factor * self.encode,
            fetch=factor * self.fetch,
            step=factor * self.step,
        )


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """Numbers of prompts and steps of a repair, and planned seconds for training and for the work
    after it. ``samples``: Number of prompts to train on. 0: no training."""

    held_out: int
    closed_form: int
    samples: int
    steps: int
    training_s: float
    measuring_s: float

    @classmethod
    def for_time(
        cls,
        seconds: float,
        speeds: Speeds,
        questions: int,
        *,
        recipes: int,
        batch: int,
        limits: Limits,
    ) -> RepairPlan:
        """Create a plan for ``seconds``: a quarter for held-out questions, a fifth of the rest for
        the closed form, and the remainder for training, within the limits. If training does not
        fit, the closed form gets the remainder, too. If there are too few held-out questions to
        choose an adapter, none is fitted, and all are held out. Raises ``DataError``."""
        check_enough(questions, limits)
        budget_s, held_s = seconds, speeds.held_out(recipes)
        most = min(limits.held_out, math.floor(limits.held_out_share * questions))
        held_out = _within(seconds / 4, held_s, limits.fewest_held_out, most)
        if has_few := held_out // 2 < limits.fewest_to_choose:
            most = min(limits.held_out, questions)
            held_out = _within(seconds, held_s, limits.fewest_held_out, most)
        held_out -= held_out % 2
        seconds -= held_out * held_s
        left = 0 if has_few else questions - held_out
        closed_form = _within(seconds / 5, speeds.closed_form, _FEWEST_CLOSED, limits.closed_form)
        closed_form = min(closed_form, limits.draws * left)
        seconds -= closed_form * speeds.closed_form
        if seconds < 0:
            needed = math.ceil(-seconds / 60) + 1
            raise TooLittleTimeError(
                "There is too little time to fit and measure a recipe with this model on this "
                f"machine: {max(0.0, budget_s) / 60:.1f} minutes are left, but "
                f"{(budget_s - seconds) / 60:.1f} are needed (a full-mode answer takes "
                f"{speeds.answer:.1f} s); add at least {needed} minutes (--minutes)"
            )
        checked = min(limits.validation, held_out // 2)
        measured_s = limits.measurements * checked * speeds.compare
        most = min(limits.samples, limits.draws * left)
        rest_s = max(0.0, seconds - measured_s)
        samples = min(math.floor(rest_s / speeds.sample(limits.epochs)), most)
        if samples < limits.fewest_samples:
            samples = 0
            more = math.floor(seconds / max(speeds.closed_form, 1e-9))
            closed_form = min(closed_form + more, limits.closed_form, limits.draws * left)
        training_s = samples * limits.epochs * speeds.step + measured_s
        return cls(
            held_out=held_out,
            closed_form=closed_form,
            samples=samples,
            steps=math.ceil(limits.epochs * samples / batch),
            training_s=training_s if samples else 0.0,
            measuring_s=held_out * (held_s - speeds.answer),
        )


def check_enough(questions: int, limits: Limits) -> None:
    if questions < limits.fewest_held_out + 1:
        raise DataError(
            f"Found {questions} distinct questions, expected at least "
            f"{limits.fewest_held_out + 1}, because some are used for fitting and others for "
            "measuring; pass more questions (--questions FILE) or passages"
        )


def check_time(budget_s: float, needed_s: float, speeds: Speeds) -> None:
    if needed_s > budget_s:
        minutes = math.ceil(needed_s / 60)
        raise TooLittleTimeError(
            "There is too little time to fit and measure a recipe with this model on this machine: "
            f"found {budget_s / 60:g} minutes, expected at least {minutes} (a full-mode answer "
            f"takes {speeds.answer:.1f} s). Pass --minutes {minutes}, or more for a better recipe"
        )


def least_s(speeds: Speeds, recipes: int, limits: Limits) -> float:
    return limits.fewest_held_out * speeds.held_out(recipes) + _FEWEST_CLOSED * speeds.closed_form


def _within(seconds: float, each: float, fewest: int, most: int) -> int:
    """Number of items of ``each`` seconds that fit in ``seconds``, within bounds."""
    return max(fewest, min(most, math.floor(seconds / max(each, 1e-9))))
