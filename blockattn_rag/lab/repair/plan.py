"""The plan of a repair: numbers of prompts and steps that fit into its time at measured speeds.

No torch here, so that the command line can read the limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from blockattn_rag.errors import DataError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a repair. They are not options, because measurements decide within them.

    Args:
        questions: Most questions that the model writes; more bring little, and take time from the
            fit.
        writing_share: Share of the time that writing questions may take.
        passages: Passages of a prompt, as many as ``ask`` retrieves. Fits see 1 to this many, and
            measurements this many.
        answer_tokens: Longest answer of full mode. Answers to factual questions are decided within
            it, and each token takes a forward.
        top_k: The teacher's likeliest tokens that are kept at each token of an answer; the rest
            counts as one token.
        held_out: Questions for choosing and for measuring, together: fewer leave intervals too
            wide to be useful, more take time from the fit.
        held_out_share: Most of the questions that are held out.
        fewest_held_out: Fewest of them: two to choose on and two to measure on, as a spread needs
            two.
        promotion_needs: Fewest questions to choose promotion on, which costs tokens per answer:
            the standard error of a few is too uncertain.
        closed_form: Prompts of the closed form; it does not improve with more.
        samples: Most prompts to train on.
        draws: Most samples of one question, each with other passages.
        fewest_samples: Fewest prompts that a training is worth.
        epochs: Passes over the samples. On held-out questions, new samples bring more than
            further passes.
        measurements: How often a training is measured, and saved to resume from.
        validation: Prompts that it is measured on.
        store_bytes: Bytes of keys and values in the work folder.
    """

    questions: int = 240
    writing_share: float = 0.2
    passages: int = 5
    answer_tokens: int = 24
    top_k: int = 64
    held_out: int = 64
    held_out_share: float = 0.25
    fewest_held_out: int = 4
    promotion_needs: int = 16
    closed_form: int = 40
    samples: int = 480
    draws: int = 4
    fewest_samples: int = 16
    epochs: float = 1.5
    measurements: int = 4
    validation: int = 12
    store_bytes: int = 8 << 30


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds that one prompt takes, measured before the plan is made.

    Args:
        answer: Full mode's answer.
        encode: Its context in full attention; its passages alone take about as long.
        fetch: Its passages after the sink, from the store or computed.
        step: Forward and backward pass of a student.
    """

    answer: float
    encode: float
    fetch: float
    step: float

    @property
    def compare(self) -> float:
        """One recipe's predictions: a forward without the backward pass of twice its time."""
        return self.step / 2

    def held_out(self, recipes: int) -> float:
        """A held-out prompt: full mode's answer, passages encoded alone and after the sink, every
        recipe's predictions, and its answers where right answers are known."""
        return self.answer + self.encode + self.fetch + (recipes + 2) * self.compare

    def sample(self, epochs: float) -> float:
        """A prompt to train on."""
        return self.answer + self.fetch + epochs * self.step

    @property
    def closed_form(self) -> float:
        """A prompt of the closed form: its passages, and all of it in full attention."""
        return 2 * self.encode


@dataclass(frozen=True, slots=True)
class Plan:
    """How many prompts and steps a repair takes.

    Args:
        held_out: Questions to choose and to measure on.
        closed_form: Prompts of the closed form.
        samples: Prompts to train on. 0: no training.
        steps: Optimizer steps.
        training_s: Seconds planned for the steps.
        measuring_s: Seconds planned for what comes after them.
    """

    held_out: int
    closed_form: int
    samples: int
    steps: int
    training_s: float
    measuring_s: float

    @classmethod
    def made(
        cls,
        seconds: float,
        speeds: Speeds,
        questions: int,
        *,
        recipes: int,
        batch: int,
        limits: Limits,
    ) -> Plan:
        """The plan for so many seconds.

        Held-out questions get at most a quarter of the time and the closed form a fifth; the
        training gets the rest.

        Args:
            seconds: Seconds that are left.
            questions: Distinct questions.
            recipes: Recipes to compare.
            batch: Prompts of an optimizer step.

        Raises:
            DataError: There are too few questions, or there is too little time.
        """
        if questions < limits.fewest_held_out + 1:
            raise DataError(
                f"found {questions} distinct questions, expected at least "
                f"{limits.fewest_held_out + 1}: some to fit and others to measure on; give more "
                "questions (--questions FILE) or passages"
            )
        given, held_s = seconds, speeds.held_out(recipes)
        most = min(limits.held_out, math.floor(limits.held_out_share * questions))
        held_out = _within(seconds / 4, held_s, limits.fewest_held_out, most)
        held_out -= held_out % 2
        seconds -= held_out * held_s
        left = questions - held_out
        closed_form = _within(seconds / 5, speeds.closed_form, 2, limits.closed_form)
        closed_form = min(closed_form, limits.draws * left)
        seconds -= closed_form * speeds.closed_form
        if seconds < 0:
            needed = math.ceil(-seconds / 60) + 1
            raise DataError(
                "there is too little time to fit and measure a recipe with this model on this "
                f"machine: found {given / 60:.1f} minutes left, expected "
                f"{(given - seconds) / 60:.1f} (an answer of full mode takes {speeds.answer:.1f} "
                f"s); give at least {needed} minutes more (--minutes)"
            )
        measuring_s = held_out * (held_s - speeds.answer)
        fixed = cls(held_out, closed_form, 0, 0, 0.0, measuring_s)
        plan = fixed.trained(seconds, speeds, questions, batch=batch, limits=limits)
        if not plan.samples:
            more = math.floor(seconds / max(speeds.closed_form, 1e-9))
            closed_form = min(closed_form + more, limits.closed_form, limits.draws * left)
        return replace(plan, closed_form=closed_form)

    def trained(
        self, seconds: float, speeds: Speeds, questions: int, *, batch: int, limits: Limits
    ) -> Plan:
        """This plan with as much training as fits into ``seconds``.

        The samples of this plan have their answers and their blocks already. A repair calls this
        again before the training: speeds change when other processes start and end.

        Args:
            seconds: Seconds for samples and steps.
            speeds: Speeds of now.
            questions: Distinct questions.
            batch: Prompts of an optimizer step.
        """
        checked = min(limits.validation, self.held_out // 2)
        measured = limits.measurements * checked * speeds.compare
        stepping = limits.epochs * speeds.step
        seconds = max(0.0, seconds - measured)
        samples = self.samples + (seconds - self.samples * stepping) / speeds.sample(limits.epochs)
        if samples < self.samples:
            samples = seconds / stepping
        most = min(limits.samples, limits.draws * (questions - self.held_out))
        samples = min(math.floor(samples), most)
        if samples < limits.fewest_samples:
            return replace(self, samples=0, steps=0, training_s=0.0)
        return replace(
            self,
            samples=samples,
            steps=math.ceil(limits.epochs * samples / batch),
            training_s=samples * stepping + measured,
        )


def _within(seconds: float, each: float, fewest: int, most: int) -> int:
    """How many fit into the seconds, within bounds."""
    return max(fewest, min(most, math.floor(seconds / max(each, 1e-9))))
