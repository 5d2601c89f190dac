"""One repair: questions, full mode's answers, fits, choice, measurement, recipe.

Every stage resumes where an interruption left it: what was written, answered, fitted and compared
is in the work folder.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.find_recipe import stock_sink
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import DataError
from blockattn_rag.files import write_json
from blockattn_rag.lab.repair import checks
from blockattn_rag.lab.repair.choice import choose as choose_recipe
from blockattn_rag.lab.repair.comparing import IN_USE, Comparer, free_recipes, promoting
from blockattn_rag.lab.repair.plan import LIMITS, Limits, Plan, Speeds
from blockattn_rag.lab.repair.questions import Nearest, write_questions
from blockattn_rag.lab.repair.report import Candidate, RepairReport, plot
from blockattn_rag.lab.repair.samples import Question, Sample, distinct, draw_samples
from blockattn_rag.lab.repair.student import BlockSource, Student
from blockattn_rag.lab.repair.teacher import Teacher
from blockattn_rag.lab.repair.trainer import (
    BATCH,
    CorrectionTrainer,
    seconds_of_a_prompt,
)
from blockattn_rag.lab.repair.work import (
    ReadThroughStore,
    kept_json,
    remove,
    work_folder,
    work_of,
)
from blockattn_rag.lab.training.correction import fit_correction, no_correction
from blockattn_rag.lab.training.work import last_checkpoint
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.correction import Correction
from blockattn_rag.model.correction_file import read_correction, save_correction
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.formats import Passage
from blockattn_rag.store.base import KVStore

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, what is done of it, and all of it."""

_SEED = 0
_RESERVE_SHARE = 0.08
"""Share of the time that is not planned: loading, saving, and what takes longer than measured."""

_LATEST = 1.3
"""A training ends after so many times its planned seconds."""


@dataclass(frozen=True, slots=True)
class Material:
    """What a recipe is fitted to.

    Args:
        prompt: Makes the prompt of a question and its passages, as it will be asked.
        prompt_format: Name of that format.
        passages: Passages to write questions about.
        nearest: Finds the passages of a question. None: questions have their own.
        questions: Questions as they are asked. None: the model writes some.
        lender: Store that may hold passages' keys and values. It is not written.
        namespace: Namespace of the passages in ``lender``.
        in_use: Recipe that the model runs with so far, if it has an adapter. It is kept unless
            another is better.
    """

    prompt: Callable[[str, Sequence[Passage]], BlockPrompt]
    prompt_format: str
    passages: Sequence[Passage] = ()
    nearest: Nearest | None = None
    questions: Sequence[Question] | None = None
    lender: KVStore | None = None
    namespace: str = ""
    in_use: Recipe | None = None

    def inputs(self) -> dict[str, str]:
        """The material in words, for people to compare: numbers and digests."""
        found = {
            "passages": _digest(self.passages, [[p.title, p.text] for p in self.passages]),
            "prompt format": self.prompt_format,
            "questions": "written by the model",
            "recipe in use": str(self.in_use or "none with an adapter"),
        }
        if self.questions is not None:
            parts = [[q.text, q.answers, [p.text for p in q.passages]] for q in self.questions]
            found["questions"] = _digest(self.questions, parts)
        return found


def _digest(counted: Sequence[Any], parts: Any) -> str:
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return f"{len(counted)} (sha256 {digest[:12]})"


def repair(
    model: BlockModel,
    material: Material,
    output: Path,
    *,
    minutes: float = 20.0,
    version: str = "",
    limits: Limits = LIMITS,
    on_progress: Progress = lambda *_: None,
) -> Recipe:
    """Fit recipes for a model, choose the simplest good one, measure it, and write it.

    An interrupted run with the same inputs is resumed. The model's own weights are frozen from here
    on, and are not changed.

    Args:
        model: The stock model.
        material: What to fit to.
        output: Folder of the recipe; an earlier recipe there is replaced.
        minutes: Minutes that the repair may take.
        version: Version of this package, for the report.
        limits: Bounds of numbers; see ``plan.Limits``.
        on_progress: Called with each stage's progress.

    Returns:
        The recipe, with its report.

    Raises:
        DataError: Too few questions or passages, too little time, a block-fine-tuned model, or an
            interrupted run with other inputs.
        DivergedError: A loss is not finite.
        ContextOverflowError: A prompt and its answer do not fit in the context window.
        ImportError: A package is missing.
        OSError: The output cannot be written, or there is too little room.
    """
    work = work_of(output)
    checks.check_packages()
    checks.check_stock(model)
    checks.check_output(output, model)
    most = limits.passages * (limits.samples + limits.held_out)
    checks.check_disk(work, model, material.passages, most, limits.store_bytes)
    inputs = {
        "model": f"{model.name} (fingerprint {model.fingerprint[:12]})",
        **material.inputs(),
    }
    with work_folder(work, inputs):
        run = _Run(model, material, work, 60 * minutes, limits, on_progress)
        recipe, image = run.run(version)
        recipe.save(output, plot=image)
        remove(work)
    return recipe


@dataclass
class _Run:
    """One run, stage after stage."""

    model: BlockModel
    material: Material
    work: Path
    budget_s: float
    limits: Limits
    on_progress: Progress
    started: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits, model = self.limits, self.model
        self.sink = stock_sink(model)
        store = ReadThroughStore(self.work / "kv", limits.store_bytes, self.material.lender)
        namespace = self.material.namespace
        # Memory for one prompt at a time: a store of its own must not fill twice.
        self.engine = BlockAttentionEngine(
            model, store, recipe="none", namespace=namespace, resident_bytes=0
        )
        self.source = BlockSource(model, store, self.sink, namespace)
        self.teacher = Teacher(model, self.work / "answers", limits.answer_tokens, limits.top_k)

    def run(self, version: str) -> tuple[Recipe, bytes | None]:
        """The recipe with its report, and the report's plot."""
        questions = distinct(self._questions(), _SEED)
        plan = self._plan(questions)
        train, held = self._samples(questions, plan)
        self._answer([*map(self._prompt, [*train[: plan.samples], *held])])
        half = len(held) // 2
        choose, report_on = held[:half], held[half:]
        closed = self._closed_form([*map(self._prompt, train[: plan.closed_form])])
        answered, plan = plan.samples, self._replanned(plan, questions)
        to_train = [*map(self._prompt, train[: plan.samples])]
        if plan.samples > answered:
            self._answer(to_train)
        to_check = [*map(self._prompt, choose[: self.limits.validation])]
        trained, curve = self._trained(closed, to_train, to_check, plan)
        comparer = Comparer(self.engine, self.teacher, self._prompt, self.work / "records.jsonl")
        recipes = free_recipes(self.model, self.sink, closed, trained, self.material.in_use)
        with self._stage("choosing") as tick:
            losses = comparer.losses(choose, recipes, tick)
            if len(choose) >= self.limits.promotion_needs:
                recipes |= promoting(self.model, recipes, losses)
                losses = comparer.losses(choose, recipes, tick)
        costly = [name for name, recipe in recipes.items() if recipe.promote]
        in_use = IN_USE if IN_USE in recipes else None
        chosen = choose_recipe(losses, costly, in_use)
        with self._stage("measuring") as tick:
            measured = comparer.compared(report_on, recipes, tick)
        with self._stage("right answers") as tick:
            right, answered_count = comparer.right(
                report_on, recipes[chosen], self.limits.answer_tokens, tick
            )
        report = RepairReport(
            model=self.model.name,
            fingerprint=self.model.fingerprint,
            chosen=chosen,
            candidates=[
                Candidate(name, float(losses[name].mean()), measured[name]) for name in recipes
            ],
            passages=self.limits.passages,
            questions=len(questions),
            written=self.material.questions is None,
            chosen_on=len(choose),
            measured_on=len(report_on),
            right=right,
            answered=answered_count,
            plan=plan.to_dict(),
            curve=curve,
            seconds=self.seconds,
            version=version,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        found = recipes[chosen]
        final = Recipe(
            sink=found.sink,
            adapter=found.adapter,
            promote=found.promote,
            fingerprints=(self.model.fingerprint,),
            model=self.model.name,
            prompt_format=self.material.prompt_format,
            report=report.to_dict(),
        )
        return final, plot(report)

    # -- questions and the plan --------------------------------------------------------------

    def _questions(self) -> Sequence[Question]:
        material, limits = self.material, self.limits
        if material.questions is not None:
            return material.questions
        if material.nearest is None:
            raise DataError("found no questions, and no passages to write questions about")
        until = self.started + limits.writing_share * self.budget_s
        # Once there is a plan, no question is added: all of them decide which are held out.
        planned = self._plan_path.exists()
        with self._stage("writing questions") as tick:
            return write_questions(
                self.engine,
                material.passages,
                material.nearest,
                limits.questions,
                limits.passages + 1,
                self.work / "questions.jsonl",
                _SEED,
                tick,
                lambda: planned or time.monotonic() > until,
            )

    @property
    def _plan_path(self) -> Path:
        return self.work / "plan.json"

    def _plan(self, questions: Sequence[Question]) -> Plan:
        """The plan, made once: a resumed run has the same."""

        def make() -> dict[str, Any]:
            speeds = self._speeds(questions[:2])
            left = self._until_reserve() - time.monotonic()
            recipes = 4 + self.model.supports_relay + (self.material.in_use is not None)
            plan = Plan.made(
                left, speeds, len(questions), recipes=recipes, batch=BATCH, limits=self.limits
            )
            return plan.to_dict()

        kept = kept_json(self._plan_path, lambda: {"minutes": self.budget_s / 60, **make()})
        if (minutes := kept.pop("minutes")) != self.budget_s / 60:
            raise DataError(
                f"{self.work} holds an interrupted repair of {minutes:g} minutes, found "
                f"{self.budget_s / 60:g}: give the same --minutes to resume it, or delete that "
                "folder to start again"
            )
        return Plan(**kept)

    def _replanned(self, plan: Plan, questions: Sequence[Question]) -> Plan:
        """The plan with the training that fits now, at the speeds of now; made once, too."""

        def make() -> dict[str, Any]:
            speeds = self._speeds(questions[-2:])
            left = self._until_reserve() - plan.measuring_s - time.monotonic()
            limits = self.limits
            return plan.trained(left, speeds, len(questions), batch=BATCH, limits=limits).to_dict()

        return Plan(**kept_json(self.work / "training-plan.json", make))

    def _until_reserve(self) -> float:
        """The time, on the monotonic clock, at which the work should be done."""
        return self.started + (1 - _RESERVE_SHARE) * self.budget_s

    def _speeds(self, questions: Sequence[Question]) -> Speeds:
        """Seconds of two prompts, the second of which is counted: the first warms up."""
        with self._stage("measuring speed") as tick:
            return self._measured_speeds(questions, tick)

    def _measured_speeds(
        self, questions: Sequence[Question], tick: Callable[[int, int], None]
    ) -> Speeds:
        student = Student(self.model, no_correction(self.model, self.sink))
        self.model.hf_model.requires_grad_(False)
        most = self.limits.passages
        found = Speeds(0.0, 0.0, 0.0, 0.0)
        for number, sample in enumerate(draw_samples(questions[:2], 2, most, most, _SEED)):
            tick(number, 2)
            prompt = self._prompt(sample)
            answer = _timed(lambda: self.teacher(prompt))  # noqa: B023 - called at once
            ids = self.model.tokenizer.prompt_ids(prompt).flat
            encode = _timed(
                lambda: list(self.model.encode([EncodeRequest(list(ids), "", "")]))  # noqa: B023
            )
            fetch = _timed(lambda: self.source(prompt))  # noqa: B023
            step = seconds_of_a_prompt(student, self.teacher, self.source, prompt)
            found = Speeds(answer, encode, fetch, step)
        tick(2, 2)
        return found

    def _samples(
        self, questions: Sequence[Question], plan: Plan
    ) -> tuple[list[Sample], list[Sample]]:
        """Samples to fit to, of one passage and more, and held-out ones of as many as are asked.

        The first of the samples that the limits allow are used, as many as there is time for.
        """
        held, rest = questions[: plan.held_out], questions[plan.held_out :]
        most = self.limits.passages
        count = max(self.limits.samples, plan.closed_form)
        return (
            draw_samples(rest, count, 1, most, _SEED),
            draw_samples(held, len(held), most, most, _SEED + 1),
        )

    def _prompt(self, sample: Sample) -> BlockPrompt:
        prompt = self.material.prompt(sample.question, sample.passages)
        if len(prompt.context) < 2:
            raise DataError(
                "found a prompt of one context block, whose block mode is the same as full mode; "
                "give questions with more passages"
            )
        return prompt

    def _answer(self, prompts: Sequence[BlockPrompt]) -> None:
        with self._stage("full mode's answers") as tick:
            self.teacher.answer_all(prompts, tick)

    # -- fits --------------------------------------------------------------------------------

    def _closed_form(self, prompts: Sequence[BlockPrompt]) -> Correction:
        path = self.work / "closed-form.safetensors"
        if not path.is_file():
            contexts = [self.model.tokenizer.prompt_ids(prompt).context for prompt in prompts]
            # A fifth chooses the penalty of the fit.
            held = max(1, len(contexts) // 5)
            with self._stage("fitting in closed form") as tick:
                correction, _ = fit_correction(
                    self.model, contexts[held:], contexts[:held], sink=self.sink, on_progress=tick
                )
            save_correction(correction, path)
        return read_correction(path)

    def _trained(
        self,
        closed: Correction,
        train: Sequence[BlockPrompt],
        held: Sequence[BlockPrompt],
        plan: Plan,
    ) -> tuple[Correction | None, list[dict[str, float]]]:
        """The correction trained by gradients, and its curve; None if there is no time for it."""
        path, curve = self.work / "trained.safetensors", self.work / "curve.json"
        if not plan.samples:
            return None, []
        if not path.is_file():
            self.model.hf_model.requires_grad_(False)
            folder = self.work / "checkpoints"
            checkpoint = last_checkpoint(folder) if folder.is_dir() else None
            latest = min(
                self._until_reserve() - plan.measuring_s,
                time.monotonic() + _LATEST * plan.training_s,
            )
            with self._stage("training") as tick:
                trainer = CorrectionTrainer(
                    Student(self.model, closed),
                    self.teacher,
                    self.source,
                    folder,
                    train,
                    held,
                    max_steps=plan.steps,
                    eval_steps=max(1, plan.steps // self.limits.measurements),
                    is_resumed=checkpoint is not None,
                    on_progress=tick,
                    time_is_up=lambda: time.monotonic() > latest,
                )
                trainer.train_from(checkpoint)
            write_json(curve, trainer.curve)
            save_correction(trainer.student.finished(), path)
        return read_correction(path), json.loads(curve.read_text(encoding="utf-8"))

    @contextmanager
    def _stage(self, name: str) -> Iterator[Callable[[int, int], None]]:
        started = time.monotonic()
        yield partial(self.on_progress, name)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def _timed(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started
