"""Stages of a repair: questions, full mode's answers, fits, selection, and measurement.

Questions, answers, fits and comparisons are stored in the work folder, from which an interrupted
run resumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from blockattn_rag.engine import BlockAttentionEngine, Recipe
from blockattn_rag.engine.outline import FREE_SINK
from blockattn_rag.errors import DataError
from blockattn_rag.files import write_json
from blockattn_rag.lab import work
from blockattn_rag.lab.evaluation.collection import TOLERANCE, Asked
from blockattn_rag.lab.evaluation.datasets import digest_of
from blockattn_rag.lab.evaluation.records import FULL
from blockattn_rag.lab.repair.closed_form import fit_correction, no_correction
from blockattn_rag.lab.repair.compare import Comparer, count_candidates, free_recipes
from blockattn_rag.lab.repair.data import (
    SEED,
    WRITTEN_AT_ONCE,
    Material,
    Question,
    distinct_questions,
    draw_samples,
    write_questions,
)
from blockattn_rag.lab.repair.plan import (
    Limits,
    RepairPlan,
    Speeds,
    check_enough,
    check_time,
    least_s,
)
from blockattn_rag.lab.repair.report import plot
from blockattn_rag.lab.repair.student import (
    BATCH,
    BlockSource,
    ReadThroughStore,
    Student,
    correction_loss,
    train_correction,
)
from blockattn_rag.lab.repair.teacher import Teacher
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.correction import Correction, read_correction, save_correction
from blockattn_rag.prompts.blocks import BlockPrompt

Progress = Callable[[str, int, int], None]
"""Progress callback: name of the stage, completed work, and total work."""

PLAN, QUESTIONS = "plan.json", "questions.jsonl"
"""Files in the work folder: the plan, and the generated questions."""

_STAND_IN = "What does the text say?"
"""Question used to measure speeds before questions have been generated."""

_WARM_UP = 200
"""Number of characters of each passage in the warm-up."""

_RESERVE_SHARE = 0.08
"""Fraction of the time reserved for loading, saving, and work that is slower than measured."""

LATEST = 1.3
"""Multiple of the planned training time after which training is stopped."""


@dataclass
class Repair:
    """One run of ``repair``: its stages, and the state that they share."""

    model: BlockModel
    material: Material
    folder: Path
    budget_s: float
    limits: Limits
    on_progress: Progress
    tolerance: float = TOLERANCE
    started: float = field(default_factory=time.monotonic, init=False)
    seconds: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        limits, model, namespace = self.limits, self.model, self.material.namespace
        # The reserved part of the time limit starts at this time on the monotonic clock.
        self.until = self.started + (1 - _RESERVE_SHARE) * self.budget_s
        store = ReadThroughStore(self.folder / "kv", limits.store_bytes, self.material.lender)
        # Without resident blocks, only the blocks of one prompt are in memory at a time.
        self.engine = BlockAttentionEngine(
            model, store, recipe="none", namespace=namespace, resident_bytes=0
        )
        self.source = BlockSource(model, store, FREE_SINK, namespace)
        self.teacher = Teacher(model, self.folder / "answers", limits.answer_tokens, limits.top_k)
        self.most_recipes = count_candidates(model, self.material.in_use)

    def run(self, version: str) -> tuple[Recipe, bytes | None]:
        """Run all stages. Returns the recipe with its report, and the report's ``plot``."""
        # Measure speeds first, so that insufficient time is reported before any other work.
        speeds = None if (self.folder / PLAN).exists() else self._checked_speeds()
        questions = distinct_questions(self._questions(speeds))
        plan = self._plan(questions, speeds)
        train, held = self.samples(questions, plan)
        asked = [self._asked(sample) for sample in held]
        self._answer([one.prompt for one in asked])
        half = len(asked) // 2
        choose_on, report_on = asked[:half], asked[half:]
        in_use = self.material.in_use
        curve: list[dict[str, float]] = []
        fitted: dict[str, Correction] = {}
        comparer = Comparer(self.engine, self.teacher, self.limits, self.folder / "records.jsonl")
        if plan.closed_form:
            fitted["closed form"] = self.closed_form(self._prompts(train[: plan.closed_form]))
            recipes = free_recipes(fitted, in_use)
            with self._stage("comparing the first fit") as tick:
                if not comparer.adapter_helps(choose_on, recipes, tick):
                    plan = replace(plan, samples=0, steps=0, training_s=0.0)
        if plan.samples:
            prompts = self._prompts(train[: plan.samples])
            self._answer(prompts)
            checked = [one.prompt for one in choose_on[: self.limits.validation]]
            fitted["trained"], curve = self._trained(fitted["closed form"], prompts, checked, plan)
        with self._stage("choosing") as tick:
            recipes = free_recipes(fitted, in_use)
            choice = comparer.choice(choose_on, recipes, self.tolerance, tick)
        chosen, recipes = choice.recipes[choice.name], choice.recipes
        with self._stage("measuring") as tick:
            measured = comparer.compared(report_on, recipes, tick)
        with self._stage("right answers") as tick:
            tick(0, 1)
            right = comparer.right(report_on, {"block": Recipe(), "recipe": chosen})
            tick(1, 1)
        report = {
            "model": self.model.name,
            "fingerprint": self.model.fingerprint,
            "chosen": choice.name,
            "tolerance": self.tolerance,
            "shares": choice.shares,
            "candidates": [
                {"name": name, "loss": choice.losses[name], **measured[name].to_dict()}
                for name in recipes
            ],
            "passages": self.limits.passages,
            "questions": len(questions),
            "written": self.material.questions is None,
            "chosen_on": len(choose_on),
            "measured_on": len(report_on),
            "right": {name: sum(answers) for name, answers in right.items()},
            "answered": len(right.get(FULL, ())),
            "plan": asdict(plan),
            "curve": curve,
            "seconds": self.seconds,
            "version": version,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        recipe = replace(
            chosen,
            fingerprints=(self.model.fingerprint,),
            model=self.model.name,
            prompt_format=self.material.prompt_format,
            report=report,
            source="",
        )
        return recipe, plot(report)

    # -- questions and the plan --------------------------------------------------------------

    def _checked_speeds(self) -> Speeds:
        material, limits = self.material, self.limits
        if material.questions is not None:
            check_enough(len(distinct_questions(material.questions)), limits)
            sample = material.questions[0]
        elif material.nearest is None or not material.passages:
            raise DataError("Found no questions or passages; pass --questions, --passages or --db")
        else:
            sample = Question(_STAND_IN, tuple(material.passages[: limits.passages]))
        speeds = self.speeds(sample)
        needed = least_s(speeds, self.most_recipes, limits)
        if material.questions is None and not (self.folder / QUESTIONS).exists():
            needed += WRITTEN_AT_ONCE * speeds.answer
        spent = time.monotonic() - self.started
        check_time(self.budget_s, (spent + needed) / (1 - _RESERVE_SHARE), speeds)
        return speeds

    def _questions(self, speeds: Speeds | None) -> Sequence[Question]:
        """Return the questions of the repair. If a plan exists (``speeds`` is None), no more
        questions are generated, because the split into fitted and held-out questions depends on all
        of them."""
        material, limits = self.material, self.limits
        if material.questions is not None:
            return material.questions
        until = self.started + limits.writing_share * self.budget_s
        if speeds is not None:
            needed = least_s(speeds, self.most_recipes, limits)
            until = min(until, self.until - needed - WRITTEN_AT_ONCE * speeds.answer)
        with self._stage("writing questions") as tick:
            return write_questions(
                self.engine,
                material,
                limits,
                self.folder / QUESTIONS,
                tick,
                lambda: speeds is None or time.monotonic() > until,
            )

    def _plan(self, questions: Sequence[Question], speeds: Speeds | None) -> RepairPlan:
        """Create the plan, or read the interrupted run's plan if ``speeds`` is None."""
        path, minutes = self.folder / PLAN, self.budget_s / 60
        if speeds is not None:
            plan = RepairPlan.for_time(
                self.until - time.monotonic(),
                speeds,
                len(questions),
                recipes=self.most_recipes,
                batch=BATCH,
                limits=self.limits,
            )
            write_json(path, {"minutes": minutes, **asdict(plan)})
        kept = work.read_work_file(path)
        if (before := kept.pop("minutes")) != minutes:
            raise DataError(
                f"{self.folder} contains an interrupted repair of {before:g} minutes, but "
                f"--minutes is {minutes:g}: pass the same --minutes to resume it, or delete that "
                "folder to start again"
            )
        return RepairPlan(**kept)

    def speeds(self, question: Question) -> Speeds:
        """Estimate the seconds of each step for a prompt with as many passages as ``ask``
        retrieves. Speeds are measured on a prompt with two passages, after a warm-up on their
        beginnings, and scaled to a complete prompt, which would take minutes on slow machines."""
        student = Student(self.model, no_correction(self.model, FREE_SINK))
        loss = partial(correction_loss, student, self.teacher, self.source)
        self.model.hf_model.requires_grad_(False)

        def measured(prompt: BlockPrompt) -> Speeds:
            request = EncodeRequest(self._ids(prompt), "", "")
            return Speeds(
                answer=_timed(lambda: self.teacher.renew(prompt)),
                encode=_timed(lambda: [*self.model.encode([request])]),
                fetch=_timed(lambda: self.source(prompt)),
                step=_timed(lambda: loss(prompt).backward()),
            )

        most = self.limits.passages
        (sample,) = draw_samples([question], 1, most, most, SEED)
        shown = sample.passages[:2]
        begun = tuple(replace(p, text=p.text.strip()[:_WARM_UP] or p.text) for p in shown)
        warm_up, prompt = (self._prompt(replace(sample, passages=part)) for part in (begun, shown))
        with self._stage("measuring speed") as tick:
            tick(0, 2)
            measured(warm_up)
            tick(1, 2)
            speeds = measured(prompt)
            tick(2, 2)
        complete = len(self._ids(self._prompt(sample)))
        return speeds.longer(complete / len(self._ids(prompt)))

    def _ids(self, prompt: BlockPrompt) -> list[int]:
        return [*self.model.tokenizer.prompt_ids(prompt).flat]

    def samples(
        self, questions: Sequence[Question], plan: RepairPlan
    ) -> tuple[list[Question], list[Question]]:
        """Draw training samples, as many as the limits permit, and a sample per held-out question.
        Held-out samples have as many passages as ``ask`` retrieves; training samples may have
        fewer."""
        held, rest = questions[: plan.held_out], questions[plan.held_out :]
        most = self.limits.passages
        count = max(self.limits.samples, plan.closed_form)
        return (
            draw_samples(rest, count, 1, most, SEED),
            draw_samples(held, len(held), most, most, SEED + 1),
        )

    def _prompt(self, sample: Question) -> BlockPrompt:
        prompt = self.material.prompt(sample.text, sample.passages)
        if len(prompt.context) < 2:
            raise DataError(
                "Found a prompt with a single context block, for which block mode equals full "
                "mode; pass questions with more passages"
            )
        return prompt

    def _prompts(self, samples: Sequence[Question]) -> list[BlockPrompt]:
        return [self._prompt(sample) for sample in samples]

    def _asked(self, sample: Question) -> Asked:
        prompt = self._prompt(sample)
        name = digest_of([*(block.rendered for block in prompt.context), prompt.final])
        return Asked(name, sample.text, prompt, sample.answers, digest=name)

    def _answer(self, prompts: Sequence[BlockPrompt]) -> None:
        with self._stage("full mode's answers") as tick:
            self.teacher.answer_all(prompts, tick)

    # -- fits --------------------------------------------------------------------------------

    def closed_form(self, prompts: Sequence[BlockPrompt]) -> Correction:
        path = self.folder / "closed-form.safetensors"
        if not path.is_file():
            contexts = [self.model.tokenizer.prompt_ids(prompt).context for prompt in prompts]
            # A fifth of the prompts is held out to select the penalty.
            held = max(1, len(contexts) // 5)
            with self._stage("fitting in closed form") as tick:
                correction = fit_correction(
                    self.model, contexts[held:], contexts[:held], sink=FREE_SINK, on_progress=tick
                )
            save_correction(correction, path)
        return read_correction(path)

    def _trained(
        self,
        closed: Correction,
        train: Sequence[BlockPrompt],
        held: Sequence[BlockPrompt],
        plan: RepairPlan,
    ) -> tuple[Correction, list[dict[str, float]]]:
        """Train a correction. Returns the correction and its losses."""
        path, curve = self.folder / "trained.safetensors", self.folder / "curve.json"
        if not path.is_file():
            self.model.hf_model.requires_grad_(False)
            latest = min(self.until - plan.measuring_s, time.monotonic() + LATEST * plan.training_s)
            student = Student(self.model, closed)
            with self._stage("training") as tick:
                losses = train_correction(
                    student,
                    partial(correction_loss, student, self.teacher, self.source),
                    self.folder / work.CHECKPOINTS,
                    train,
                    held,
                    max_steps=plan.steps,
                    eval_steps=max(1, plan.steps // self.limits.measurements),
                    on_progress=tick,
                    time_is_up=lambda: time.monotonic() > latest,
                )
            write_json(curve, {"curve": losses})
            save_correction(student.finished(), path)
        return read_correction(path), work.read_work_file(curve)["curve"]

    @contextmanager
    def _stage(self, name: str) -> Iterator[Callable[[int, int], None]]:
        started = time.monotonic()
        yield partial(self.on_progress, name)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def _timed(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started
