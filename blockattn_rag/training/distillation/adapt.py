"""Distillation of full mode into block mode: one call, one result folder.

Every stage goes on where an interruption left it: what was written, answered, measured and trained
lies in the work folder beside the result.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blockattn_rag.attention.context_merge import LearnedMerge
from blockattn_rag.attention.merge_file import load_merge, save_merge
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.fetcher import ALONE, HowEncoded, how_encoded
from blockattn_rag.engine.made_with import foreign, made_with, warn_of_foreign
from blockattn_rag.engine.option_files import correction_digest, merge_digest
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.errors import DataError
from blockattn_rag.files.atomic import write_json
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction_file import load_correction, save_correction
from blockattn_rag.model.reader import Reader
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.checkpoints import format_for
from blockattn_rag.prompts.formats import prompt_format
from blockattn_rag.prompts.sinks import FIRST_BLOCK, NO_SINK, sink_ids
from blockattn_rag.store import DirectoryStore, KVStore
from blockattn_rag.training.correction import fit_correction
from blockattn_rag.training.distillation.asked import read_asked, write_asked
from blockattn_rag.training.distillation.config import AdaptConfig
from blockattn_rag.training.distillation.questions import Collection, write_questions
from blockattn_rag.training.distillation.report import (
    CORRECTION_FILE,
    MERGE_FILE,
    AdaptReport,
    write_card,
)
from blockattn_rag.training.distillation.run_folder import replace_output, run_folder
from blockattn_rag.training.distillation.samples import Question, Sample, draw_samples, split
from blockattn_rag.training.distillation.student import BlockSource, Student
from blockattn_rag.training.distillation.teacher import Teacher
from blockattn_rag.training.distillation.trainer import DistillationTrainer, Fidelity, measure
from blockattn_rag.training.report import write_plot
from blockattn_rag.training.work import LOG, last_checkpoint

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, what is done of it, and all of it."""


def adapt(
    model: BlockModel,
    material: Sequence[Question] | Collection,
    config: AdaptConfig,
    *,
    source: BlockSource | None = None,
    on_progress: Progress = lambda *_: None,
) -> AdaptReport:
    """Fit a reader adapter, a merge or a correction as ``config`` says and write it to
    ``config.output``.

    The model's own weights are frozen from here on, and are not changed.

    Args:
        model: the stock model.
        material: questions with passages, or passages that the model writes questions about.
        source: of passages' keys and values; default: of a store in the work folder, thrown away
            with it.
        on_progress: told of each stage's progress.

    Raises:
        FileExistsError: ``output`` exists, or an interrupted run does, and neither ``resume`` nor
            ``overwrite`` was asked for; or ``overwrite`` would replace what is no earlier result.
        DataError: too few questions or passages.
        DivergedError: a loss is not finite.
        ContextOverflowError: a prompt and its answer do not fit in the context window.
        ValueError: settings that do not fit together, with the model, or with the interrupted run.
    """
    if config.sink != FIRST_BLOCK:  # which each prompt has
        sink_ids(config.sink, model.tokenizer)
    load_merge(config.merge)
    form = format_for(config.prompt_format, model.name)
    config = replace(config, prompt_format=form.name)  # what a run notes and is resumed with
    how_encoded(model, config.sink, config.correction)
    based = {name: getattr(config, name) for name in ("sink", "correction", "merge")}
    warn_of_foreign(foreign(model, GenerateOptions(**based)))
    settings = {
        **config.decisive(),
        "fingerprint": model.fingerprint,
        "material": _digest(material),
        "the file of the correction": correction_digest(config.correction),
        "the file of the merge": merge_digest(config.merge),
    }
    with run_folder(config, settings):
        return _Run(model, config, source, on_progress).run(material)


def _digest(material: Sequence[Question] | Collection) -> str:
    if isinstance(material, Collection):
        told: list[Any] = [[p.title, p.text] for p in material.passages]
    else:
        told = [[q.text, *([p.title, p.text] for p in q.passages)] for q in material]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


@dataclass
class _Run:
    """One run, stage after stage."""

    model: BlockModel
    config: AdaptConfig
    source: BlockSource | None
    on_progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    tried: int | None = None
    made_with: Mapping[str, str] = field(init=False)
    """What the fit is made with; its files may be others when it is written."""
    asked_before: frozenset[str] = field(init=False)
    """Questions of the fits that this one goes on from, as digests."""

    def __post_init__(self) -> None:
        config = self.config
        self.made_with = made_with(config.sink, config.correction, config.merge)
        self.asked_before = read_asked(config.correction) | read_asked(config.merge)

    def run(self, material: Sequence[Question] | Collection) -> AdaptReport:
        config, model = self.config, self.model
        questions = self._questions(material)
        drawn = self._drawn(questions)
        train, held = self._prompts(drawn)
        teacher = Teacher(model, config.answers_folder, config.max_new_tokens, config.top_k)
        with self._stage("teacher") as tick:
            teacher.answer_all([*([] if config.is_closed_form else train), *held], tick)
        source = self.source or BlockSource(model, self._own_store())
        with self._stage("block mode") as tick:
            block = self._block_mode(held, teacher, source, tick)
        count = len({question.text.casefold() for question in questions})
        asked = [sample.question for part in drawn for sample in part]
        if config.is_closed_form:
            report, save = self._corrected(train, held, teacher, source, block, count)
            self._publish(report, save, asked)
            return report
        model.hf_model.requires_grad_(False)
        checkpoint = last_checkpoint(config.work / "checkpoints") if config.resume else None
        with self._stage("training") as tick:
            trainer = DistillationTrainer(
                self._student(), teacher, source, config, train, held,
                is_resumed=checkpoint is not None, on_progress=tick,
            )  # fmt: skip
            trainer.train_from(checkpoint)
        self.seconds["fetching"] = trainer.fetch_s
        report = self._report(trainer, block, len(train), len(held), count)
        save = partial(_save_student, trainer.student, model.name, self.made_with)
        self._publish(report, save, asked)
        return report

    def _corrected(
        self,
        train: Sequence[BlockPrompt],
        held: Sequence[BlockPrompt],
        teacher: Teacher,
        source: BlockSource,
        block: Fidelity,
        questions: int,
    ) -> tuple[AdaptReport, Callable[[Path], None]]:
        """Fit a correction, and measure it; the report, and what writes the correction."""
        model, sink = self.model, self.config.sink
        fitted, tested = (
            [model.tokenizer.prompt_ids(prompt).context for prompt in prompts]
            for prompts in (train, held)
        )
        with self._stage("fitting") as tick:
            correction, fit = fit_correction(model, fitted, tested, sink=sink, on_progress=tick)
        with self._stage("measuring") as tick:
            is_alone = sink == NO_SINK
            before = block if is_alone else self._measured(held, teacher, source, HowEncoded(sink))
            how = HowEncoded(sink, correction)
            after = self._measured(held, teacher, source, how, tick)
        report = AdaptReport(
            output=Path(self.config.output),
            base=model.name,
            fingerprint=model.fingerprint,
            steps=0,
            best_step=0,
            train_samples=len(train),
            held_samples=len(held),
            questions=questions,
            tried=self.tried,
            block=block,
            before=before,
            after=after,
            history=[],
            seconds=self.seconds,
            correction=fit,
        )
        return report, lambda folder: save_correction(correction, folder / CORRECTION_FILE)

    def _own_store(self) -> KVStore:
        path = self.config.work / "kv"
        return DirectoryStore(path, max_bytes=self.config.store_bytes, fsync=False)

    @contextmanager
    def _stage(self, name: str) -> Iterator[Callable[[int, int], None]]:
        started = time.monotonic()
        yield partial(self.on_progress, name)
        self.seconds[name] = time.monotonic() - started

    def _questions(self, material: Sequence[Question] | Collection) -> Sequence[Question]:
        if not isinstance(material, Collection):
            return material
        config = self.config
        engine = BlockAttentionEngine(self.model)
        path = config.work / "questions.jsonl"
        count = round(config.num_samples / (1 - config.held_out))
        with self._stage("questions") as tick:
            written = write_questions(
                engine, material, count, config.max_passages, path, config.seed, tick
            )
        self.tried = written.tried
        return written.questions

    def _drawn(self, questions: Sequence[Question]) -> list[list[Sample]]:
        """Samples to train on, and samples that are held out."""
        config, drawn = self.config, []
        for number, part in enumerate(split(questions, config.held_out, config.seed)):
            share = 1.0 if number == 0 else config.held_out / (1 - config.held_out)
            count = max(1, round(share * config.num_samples))
            fewest, most = config.min_passages, config.max_passages
            drawn.append(draw_samples(part, count, fewest, most, config.seed + number))
        return drawn

    def _prompts(self, drawn: Sequence[Sequence[Sample]]) -> list[list[BlockPrompt]]:
        """The prompts of samples."""
        tokenizer = self.model.tokenizer.tokenizer
        form = prompt_format(self.config.prompt_format)
        made = [
            [form.prompt(one.question, one.passages, tokenizer) for one in samples]
            for samples in drawn
        ]
        if any(len(prompt.context) < 2 for prompts in made for prompt in prompts):
            raise DataError(
                "found a prompt of one context block, whose block mode is the same as full mode; "
                "show more passages (min_passages, --min-passages), or questions that have more"
            )
        return made

    def _block_mode(
        self,
        held: Sequence[BlockPrompt],
        teacher: Teacher,
        source: BlockSource,
        tick: Callable[[int, int], None],
    ) -> Fidelity:
        """Held-out figures of block mode with each block alone; measured once for all."""
        path = self.config.work / "block.json"
        if path.is_file():
            return Fidelity(**json.loads(path.read_text(encoding="utf-8")))
        found = self._measured(held, teacher, source, ALONE, tick)
        write_json(path, found._asdict())
        return found

    def _measured(
        self,
        held: Sequence[BlockPrompt],
        teacher: Teacher,
        source: BlockSource,
        how: HowEncoded,
        tick: Callable[[int, int], None] = lambda *_: None,
    ) -> Fidelity:
        """Held-out figures of block mode with blocks that are encoded as ``how`` says."""

        def logits_of(prompt: BlockPrompt, answer_ids: list[int]) -> torch.Tensor:
            ready = source(prompt, how)
            cache = self.model.cache_for(ready.context)
            return self.model.answer_logits([], ready.final_ids, answer_ids, cache)

        return measure(held, teacher, logits_of, tick)

    def _student(self) -> Student:
        config, model = self.config, self.model
        if config.fit == "reader":
            reader = Reader.new(
                model.hf_model,
                rank=config.rank,
                alpha=2 * config.rank if config.alpha is None else config.alpha,
                targets="all-linear" if config.targets is None else list(config.targets),
                seed=config.seed,
            )
            return Student(model, reader=reader, merge=load_merge(config.merge))
        if config.fit == "correction":
            return Student(model, correction=load_correction(config.correction))
        text = model.config.get_text_config(decoder=True)
        values = [of_values for _, of_values in model.profile.layer_outlines]
        if len(set(values)) > 1:
            raise DataError("a learned merge needs layers of one shape; this model has several")
        heads, (kv_heads, size, _) = text.num_attention_heads, values[0]
        return Student(model, merge=LearnedMerge.identity(len(values), heads, kv_heads, size))

    def _report(
        self, trainer: DistillationTrainer, block: Fidelity, train: int, held: int, questions: int
    ) -> AdaptReport:
        state = trainer.state
        measured = {
            int(entry["step"]): Fidelity(entry["eval_kl"], entry["eval_agreement"])
            for entry in state.log_history
            if "eval_kl" in entry
        }
        trained = [step for step in measured if step]
        best = min(trained, key=lambda step: measured[step].kl)
        wanted = {"step", "loss", "eval_kl", "eval_agreement"}
        history = [{k: v for k, v in e.items() if k in wanted} for e in state.log_history]
        return AdaptReport(
            output=Path(self.config.output),
            base=self.model.name,
            fingerprint=self.model.fingerprint,
            steps=state.global_step,
            best_step=best,
            train_samples=train,
            held_samples=held,
            questions=questions,
            tried=self.tried,
            block=block,
            before=measured[0],
            after=measured[best],
            history=[entry for entry in history if len(entry) > 1],
            seconds=self.seconds,
        )

    def _publish(
        self, report: AdaptReport, save: Callable[[Path], None], asked: Sequence[str]
    ) -> None:
        """Write the result, its card, log and plot beside the output, then rename."""
        staging = self.config.work / "result"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        save(staging)
        write_json(staging / LOG, report.history)  # by which an earlier result is known
        if report.history:
            curve = [{k: v for k, v in e.items() if k != "eval_agreement"} for e in report.history]
            write_plot(curve, staging / "training_curves.png")
        write_asked(staging, asked, self.asked_before)
        write_card(self.config, report, staging / "README.md")
        replace_output(self.config, staging)


def _save_student(student: Student, base: str, told: Mapping[str, str], folder: Path) -> None:
    """Write what was trained; ``base``: the model, as it was named; ``told``: what it was made
    with."""
    fingerprint = student.model.fingerprint
    if student.reader is not None:
        student.reader.save(folder, {"base_model": base, "fingerprint": fingerprint, **told})
    elif student.correction is not None:
        save_correction(student.correction, folder / CORRECTION_FILE)
    else:
        assert isinstance(student.merge, LearnedMerge)
        save_merge(student.merge, folder / MERGE_FILE, fingerprint, told)
