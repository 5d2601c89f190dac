"""Whole runs on a tiny model: what is learned, what is written, and what survives a kill."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blockattn_rag.attention.context_merge import LearnedMerge
from blockattn_rag.attention.merge_file import load_merge
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.option_files import merge_digest
from blockattn_rag.errors import DataError, DivergedError
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction_file import load_correction
from blockattn_rag.prompts.formats import BLANK_LINE, FORMATS, PromptFormat
from blockattn_rag.training.repair import adapt as module
from blockattn_rag.training.repair import questions
from blockattn_rag.training.repair.adapt import adapt
from blockattn_rag.training.repair.asked import question_digest, read_asked
from blockattn_rag.training.repair.config import AdaptConfig
from blockattn_rag.training.repair.questions import Collection
from blockattn_rag.training.repair.report import AdaptReport
from blockattn_rag.training.repair.teacher import Teacher
from blockattn_rag.training.repair.trainer import stale_measurements
from tests.models import tiny_model, tiny_tokenizer
from tests.training.repair.runs import (
    PASSAGES,
    PROMPT,
    QUESTIONS,
    block_model,
    config,
    nearest,
)

LONGER: dict[str, Any] = {"epochs": 8.0, "eval_steps": 6}
MERGE: dict[str, Any] = {"fit": "merge", "learning_rate": None, "epochs": 8.0, "eval_steps": 6}


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return block_model()


@pytest.fixture(scope="module")
def folder(model: BlockModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a run."""
    folder: Path = tmp_path_factory.mktemp("result") / "mine"
    adapt(model, QUESTIONS, config(folder))
    return folder


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("some/model", {}, "chat"),
        ("hxia7/Llama-3.2-1B-Block-FT", {}, "llama3-block"),
        ("hxia7/Llama-3.2-1B-Block-FT", {"prompt_format": "turborag"}, "turborag"),
    ],
)
def test_a_known_checkpoint_is_taught_in_its_own_format_unless_another_is_given(
    name: str,
    given: dict[str, Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []
    monkeypatch.setattr(module._Run, "run", lambda run, _: found.append(run.config.prompt_format))
    named = BlockModel(tiny_model(num_hidden_layers=1), tiny_tokenizer(), name=name)
    adapt(named, QUESTIONS, AdaptConfig(tmp_path / "mine", **given))
    assert found == [expected]


def result(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


class TestWhatIsLearned:
    @pytest.mark.parametrize("settings", [LONGER, MERGE], ids=["reader", "merge"])
    def test_the_held_out_divergence_falls_and_answers_use_the_result(
        self, model: BlockModel, tmp_path: Path, settings: dict[str, Any]
    ) -> None:
        stages: dict[str, tuple[int, int]] = {}

        def tell(stage: str, done: int, total: int) -> None:
            stages[stage] = done, total

        fingerprint = model.fingerprint
        report = adapt(model, QUESTIONS, config(tmp_path / "out", **settings), on_progress=tell)
        assert report.improved
        assert report.after.kl < report.before.kl
        assert report.steps == 24
        assert report.before.kl == report.history[0]["eval_kl"]
        assert {entry["step"] for entry in report.history if "eval_kl" in entry} == {
            0,
            6,
            12,
            18,
            24,
        }
        assert stages == {"teacher": (7, 7), "block mode": (1, 1), "training": (24, 24)}
        assert model.fingerprint == fingerprint
        assert not (tmp_path / "out.work").exists()
        engine = BlockAttentionEngine(model, sink="head:4")
        fit = "merge" if settings is MERGE else "reader"
        path = tmp_path / "out" / "merge.safetensors" if fit == "merge" else tmp_path / "out"
        given: dict[str, Any] = {fit: str(path)}
        stock, found = (
            engine.answer_logits(PROMPT, [70, 80], **options) for options in ({}, given)
        )
        assert (stock - found).abs().max() > 1e-3

    def test_a_correction_is_fitted_measured_and_used_when_passages_are_encoded(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        stages: dict[str, tuple[int, int]] = {}

        def tell(stage: str, done: int, total: int) -> None:
            stages[stage] = done, total

        settings = {"fit": "correction", "samples": 40, "min_passages": 3}
        report = adapt(model, QUESTIONS, config(tmp_path / "out", **settings), on_progress=tell)
        # Full mode answers held-out questions alone.
        held = report.held_samples
        every = {"teacher", "block mode", "fitting", "measuring"}
        assert stages == dict.fromkeys(every, (held, held)) | {"fitting": (40 + held,) * 2}
        assert report.correction is not None
        assert min(report.correction.keys_explained[1:]) > 0.3
        path = str(tmp_path / "out" / "correction.safetensors")
        engine = BlockAttentionEngine(model, sink="head:4", correction=path)
        stock = engine.answer_logits(PROMPT, [70], correction="none")
        full = engine.answer_logits(PROMPT, [70], mode="full")
        found = engine.answer_logits(PROMPT, [70])
        assert (found - full).norm() < (stock - full).norm()
        card = (tmp_path / "out" / "README.md").read_text()
        assert "| corrected | " in card
        assert 'correction="out/correction.safetensors", sink="head:4"' in card

    def test_a_reader_is_trained_on_top_of_a_correction(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        adapt(model, QUESTIONS, config(tmp_path / "kv", fit="correction"))
        path = str(tmp_path / "kv" / "correction.safetensors")
        report = adapt(model, QUESTIONS, config(tmp_path / "out", correction=path))
        plain = adapt(model, QUESTIONS, config(tmp_path / "plain"))
        assert report.before != plain.before
        assert report.block.kl == pytest.approx(plain.block.kl, rel=0.02)
        card = (tmp_path / "out" / "README.md").read_text()
        assert f'sink="head:4", correction="{path}"' in card
        with pytest.raises(ValueError, match="found sink='bos'"):
            adapt(model, QUESTIONS, config(tmp_path / "bos", sink="bos", correction=path))

    def test_a_correction_is_trained_further_by_gradients(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        fitted = adapt(model, QUESTIONS, config(tmp_path / "kv", fit="correction"))
        path = str(tmp_path / "kv" / "correction.safetensors")
        settings = {**LONGER, "fit": "correction", "learning_rate": 2e-3, "correction": path}
        report = adapt(model, QUESTIONS, config(tmp_path / "out", **settings))
        # Divergences of a few millionths, in float32.
        assert report.before.kl == pytest.approx(fitted.after.kl, rel=0.05)
        assert report.after.kl < report.before.kl
        assert report.steps == 24
        assert report.correction is None
        trained, start = (
            load_correction(tmp_path / name / "correction.safetensors") for name in ("out", "kv")
        )
        assert trained.digest != start.digest
        assert (trained.sink, trained.fingerprint) == (start.sink, start.fingerprint)
        engine = BlockAttentionEngine(model, sink="head:4")
        of_trained = str(tmp_path / "out" / "correction.safetensors")
        one, other = (
            engine.answer_logits(PROMPT, [70], correction=file) for file in (of_trained, path)
        )
        assert (one - other).abs().max() > 1e-3
        card = (tmp_path / "out" / "README.md").read_text()
        assert 'correction="out/correction.safetensors", sink="head:4"' in card
        assert f"| correction | {path} |" in card

    def test_a_merge_is_fitted_on_top_of_no_other_and_matters_to_no_correction(
        self, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match="where a merge is fitted, expected 'none'"):
            config(tmp_path, fit="merge", merge="scale:0.9")
        with pytest.raises(ValueError, match="which does not matter to a correction"):
            config(tmp_path, fit="correction", merge="scale:0.9")

    def test_the_best_state_measured_is_the_result(self, model: BlockModel, tmp_path: Path) -> None:
        wild = {"learning_rate": 0.3, "eval_steps": 1, "warmup_steps": 3, "epochs": 2.0}
        report = adapt(model, QUESTIONS, config(tmp_path / "out", **wild))
        kls = {e["step"]: e["eval_kl"] for e in report.history if e["step"] and "eval_kl" in e}
        assert report.best_step == min(kls, key=lambda step: kls[step])
        assert report.best_step < report.steps
        # What the saved file gives is what was measured at the best step.
        found = adapt_measure(model, tmp_path / "out", report)
        assert found == pytest.approx(report.after.kl, rel=1e-3)

    def test_a_run_without_gain_ends_early_and_says_so(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        wild = {"learning_rate": 1.0, "eval_steps": 1, "epochs": 8.0, "patience": 2}
        report = adapt(model, QUESTIONS, config(tmp_path / "out", **wild, warmup_steps=0))
        assert report.steps < 24
        assert not report.improved
        assert "did not fall" in (tmp_path / "out" / "README.md").read_text()

    def test_a_loss_that_is_not_finite_ends_the_run(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        with pytest.raises(DivergedError):
            adapt(
                model, QUESTIONS,
                config(tmp_path / "out", learning_rate=1e30, max_grad_norm=1e30, epochs=4.0),
            )  # fmt: skip

    def test_stale_measurements_are_those_after_the_best(self) -> None:
        history = [{"eval_kl": kl} for kl in (3.0, 1.0, 2.0, 1.0)]
        assert stale_measurements([]) == 0
        assert stale_measurements(history[:2]) == 0
        assert stale_measurements([*history, {"loss": 1.0}]) == 2


def adapt_measure(model: BlockModel, folder: Path, report: Any) -> float:
    """Mean divergence of the saved reader on the held-out prompts of the run, by the engine."""
    from blockattn_rag.training.repair.trainer import measure

    run = module._Run(model, config(folder), None, lambda *_: None)
    _, held = run._prompts(run._drawn(QUESTIONS))
    teacher = Teacher(model, folder.parent / "answers", 5, 64)
    engine = BlockAttentionEngine(model, sink="head:4")
    return measure(
        held,
        teacher,
        lambda prompt, ids: engine.answer_logits(prompt, ids, reader=str(folder), assembly="copy"),
    ).kl


class TestResult:
    def test_the_card_tells_base_data_settings_and_figures(
        self, model: BlockModel, folder: Path
    ) -> None:
        card = (folder / "README.md").read_text()
        for told in (
            "base_model: tiny", model.fingerprint, 'reader="mine", sink="head:4"',
            "6 samples to train on and 1 held out, of 6 distinct questions, given.",
            "| rank | 4 |", "| block mode, each block alone | 0.", "torch 2.",
        ):  # fmt: skip
            assert told in card, told

    def test_the_log_has_the_curve(self, folder: Path) -> None:
        log = json.loads((folder / "training_log.json").read_text())
        assert [e["step"] for e in log if "eval_kl" in e] == [0, 2, 4, 6]
        assert [e["step"] for e in log if "loss" in e] == [1, 2, 3, 4, 5, 6]

    def test_it_knows_the_questions_that_were_drawn_and_no_others(
        self, model: BlockModel, folder: Path, tmp_path: Path
    ) -> None:
        assert read_asked(folder) == {question_digest(one.text) for one in QUESTIONS}
        asked: list[str] = []
        answer_all = Teacher.answer_all

        def noting(teacher: Any, prompts: Any, tick: Any) -> int:
            asked.extend(prompt.final for prompt in prompts)
            return answer_all(teacher, prompts, tick)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Teacher, "answer_all", noting)
            adapt(model, QUESTIONS, config(tmp_path / "out", samples=2, epochs=1.0))
        drawn = {one.text for one in QUESTIONS if any(one.text in final for final in asked)}
        assert len(drawn) == 3  # two to train on, one held out
        assert read_asked(tmp_path / "out") == set(map(question_digest, drawn))

    def test_it_is_the_readers_own_format(self, model: BlockModel, folder: Path) -> None:
        reader = model.load_reader(folder)
        expected = {"sink": "head:4", "correction": "none", "merge": "none", "base_model": "tiny"}
        assert {name: reader.metadata[name] for name in expected} == expected

    def test_a_chain_of_fits_knows_all_its_questions_and_what_each_was_made_with(
        self,
        model: BlockModel,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        quick: dict[str, Any] = {"samples": 2, "epochs": 1.0}
        kv, merge = tmp_path / "kv", tmp_path / "merge"
        correction, merged = str(kv / "correction.safetensors"), str(merge / "merge.safetensors")
        adapt(model, QUESTIONS[:2], config(kv, fit="correction", **quick))
        based = {"fit": "merge", "correction": correction, **quick}
        adapt(model, QUESTIONS[2:4], config(merge, **based))
        assert read_asked(merge) == {question_digest(one.text) for one in QUESTIONS[:4]}
        digest = load_correction(correction).digest
        told = load_merge(merged)
        assert isinstance(told, LearnedMerge)
        assert told.made_with == {"sink": "head:4", "correction": digest}
        on_both = {"correction": correction, "merge": merged, **quick}
        with monkeypatch.context() as patched:
            patched.setattr(module._Run, "_publish", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                adapt(model, QUESTIONS[4:], config(tmp_path / "out", **on_both))
        adapt(model, QUESTIONS[4:], config(tmp_path / "out", resume=True, **on_both))
        assert read_asked(tmp_path / "out") == {question_digest(one.text) for one in QUESTIONS}
        found = model.load_reader(tmp_path / "out").metadata
        assert (found["correction"], found["merge"]) == (digest, merge_digest(merged))
        assert "was made with" not in caplog.text
        monkeypatch.setattr(module._Run, "run", lambda *_: None)
        adapt(model, QUESTIONS, config(tmp_path / "other", merge=merged))
        assert f"the correction {digest[:12]}..., and is used with correction=none" in caplog.text


class TestMaterial:
    def test_questions_are_written_from_passages(
        self, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The tiny model writes no question, so one is made of whatever it says.
        numbers = count()
        monkeypatch.setattr(questions, "clean_question", lambda _: f"what is {next(numbers)}?")
        report = adapt(model, Collection(PASSAGES, nearest), config(tmp_path / "out"))
        assert report.tried == 6
        card = (tmp_path / "out" / "README.md").read_text()
        assert "written by the model from 6 passages" in card

    def test_answers_are_kept_for_further_runs_where_asked(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        told: list[tuple[int, int]] = []

        def tell(stage: str, done: int, total: int) -> None:
            told.extend([(done, total)] if stage == "teacher" else [])

        for name in ("one", "two"):
            told.clear()
            settings = config(tmp_path / name, answers=tmp_path / "answers", epochs=0.5)
            adapt(model, QUESTIONS, settings, on_progress=tell)
        assert told == [(7, 7)]
        assert len(list((tmp_path / "answers").iterdir())) == 7

    def test_one_question_is_refused_and_leaves_nothing(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        with pytest.raises(DataError, match="expected at least 2"):
            adapt(model, QUESTIONS[:1], config(tmp_path / "out"))
        assert list(tmp_path.iterdir()) == []

    def test_a_sink_that_the_model_lacks_is_refused_before_the_teacher_answers(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match="the head of a prompt has"):
            adapt(model, QUESTIONS, config(tmp_path / "out", sink="head:9999"))
        without = BlockModel(tiny_model(num_hidden_layers=1), tiny_tokenizer(bos=False))
        with pytest.raises(ValueError, match="this model has no BOS token"):
            adapt(without, QUESTIONS, config(tmp_path / "out", sink="bos"))
        assert list(tmp_path.iterdir()) == []

    def test_prompts_of_one_block_are_refused(
        self, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bare = PromptFormat("bare", "", "", "{text}", BLANK_LINE, "{question}")
        monkeypatch.setattr(model.tokenizer.tokenizer, "chat_template", None)
        monkeypatch.setitem(FORMATS, "bare", bare)
        with pytest.raises(DataError, match="a prompt of one context block"):
            adapt(model, QUESTIONS, config(tmp_path / "out", prompt_format="bare"))


class TestInterruption:
    @pytest.mark.parametrize("stage", ["teacher", "5"])
    def test_a_killed_run_ends_as_if_uninterrupted(
        self, model: BlockModel, folder: Path, tmp_path: Path, stage: str
    ) -> None:
        output = tmp_path / "killed"
        _kill(output, stage)
        assert not output.exists()
        with pytest.raises(FileExistsError, match="interrupted run; go on with it"):
            adapt(model, QUESTIONS, config(output))
        resumed = adapt(model, QUESTIONS, config(output, resume=True))
        assert read_asked(output) == read_asked(folder)
        log = json.loads((folder / "training_log.json").read_text())
        # A prompt's answer comes from another batch of the teacher, and rounds otherwise: by some
        # 1e-6 of logits whose divergence is some 1e-4.
        assert [e["step"] for e in resumed.history] == [e["step"] for e in log]
        assert resumed.history[-1]["eval_kl"] == pytest.approx(log[-1]["eval_kl"], rel=0.02)
        found, expected = result(output), result(folder)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)

    def test_a_run_that_ended_before_its_result_was_written_takes_no_further_step(
        self, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ended: list[AdaptReport] = []

        def publish(_: Any, report: AdaptReport, save: Callable[[Path], None], *__: Any) -> None:
            save(tmp_path / "ended")
            ended.append(report)
            raise InterruptedError

        monkeypatch.chdir(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(module._Run, "_publish", publish)
            with pytest.raises(InterruptedError):
                adapt(model, QUESTIONS, config(Path("out")))
        monkeypatch.chdir("/")  # where a relative path of the checkpoints leads nowhere
        resumed = adapt(model, QUESTIONS, config(tmp_path / "out", resume=True))
        assert resumed.history == ended[0].history
        for name, tensor in result(tmp_path / "ended").items():
            assert torch.equal(result(tmp_path / "out")[name], tensor), name

    def test_other_settings_or_questions_are_no_resumption(
        self, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module._Run, "_publish", lambda *_: 1 / 0)
        output = tmp_path / "out"
        with pytest.raises(ZeroDivisionError):
            adapt(model, QUESTIONS, config(output))
        with pytest.raises(ValueError, match="had other settings for rank"):
            adapt(model, QUESTIONS, config(output, resume=True, rank=2))
        with pytest.raises(ValueError, match="had other settings for material"):
            adapt(model, QUESTIONS[1:], config(output, resume=True))

    def test_another_correction_in_the_same_file_is_no_resumption(
        self, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for samples in (2, 6):
            adapt(
                model, QUESTIONS, config(tmp_path / f"{samples}", fit="correction", samples=samples)
            )
        file = tmp_path / "kv.safetensors"
        shutil.copy(tmp_path / "2" / "correction.safetensors", file)
        monkeypatch.setattr(module._Run, "_publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adapt(model, QUESTIONS, config(tmp_path / "out", correction=str(file)))
        shutil.copy(tmp_path / "6" / "correction.safetensors", file)
        with pytest.raises(ValueError, match="had other settings for the file of the correction"):
            adapt(model, QUESTIONS, config(tmp_path / "out", correction=str(file), resume=True))

    def test_a_result_is_replaced_only_if_asked_and_no_other_folder_is(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        output = tmp_path / "out"
        adapt(model, QUESTIONS, config(output, epochs=0.5))
        with pytest.raises(FileExistsError, match="exists; choose another output"):
            adapt(model, QUESTIONS, config(output))
        before = result(output)
        adapt(model, QUESTIONS, config(output, overwrite=True, seed=1, epochs=0.5))
        assert any(not torch.equal(t, before[name]) for name, t in result(output).items())
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "note.txt").write_text("mine")
        with pytest.raises(FileExistsError, match="no earlier result"):
            adapt(model, QUESTIONS, config(tmp_path / "other", overwrite=True))

    def test_an_earlier_correction_is_replaced_if_asked(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        for overwrite in (False, True):
            adapt(model, QUESTIONS, config(tmp_path / "out", fit="correction", overwrite=overwrite))

    def test_a_run_that_replaces_a_result_is_resumed_however_often_it_is_interrupted(
        self, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output = tmp_path / "out"
        adapt(model, QUESTIONS, config(output, epochs=0.5))
        with monkeypatch.context() as patched:
            patched.setattr(module._Run, "_publish", lambda *_: 1 / 0)
            for how in ("overwrite", "resume"):
                with pytest.raises(ZeroDivisionError):
                    adapt(model, QUESTIONS, config(output, **{how: True}))
        before = result(output)
        adapt(model, QUESTIONS, config(output, resume=True))
        assert any(not torch.equal(t, before[name]) for name, t in result(output).items())
        with pytest.raises(FileExistsError, match="exists; choose another output"):
            adapt(model, QUESTIONS, config(output, resume=True))

    def test_what_a_run_reads_or_keeps_does_not_lie_in_what_it_replaces(
        self, model: BlockModel, tmp_path: Path
    ) -> None:
        output = tmp_path / "out"
        adapt(model, QUESTIONS, config(output, fit="correction"))
        file = output / "correction.safetensors"
        for used in ({"correction": str(file)}, {"answers": output / "answers"}):
            with pytest.raises(ValueError, match="which is used; choose another output"):
                adapt(model, QUESTIONS, config(output, overwrite=True, **used))
        assert file.is_file()

    def test_a_kill_while_the_work_folder_is_removed_leaves_a_work_folder(
        self, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output, remove = tmp_path / "out", shutil.rmtree

        def remove_files_and_end(path: Path, **how: Any) -> None:
            if not output.exists():
                return remove(path, **how)
            for file in path.iterdir():
                if file.is_file():
                    file.unlink()
            raise InterruptedError

        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", remove_files_and_end)
            with pytest.raises(InterruptedError):
                adapt(model, QUESTIONS, config(output, fit="correction"))
        assert (output / "correction.safetensors").is_file()
        adapt(model, QUESTIONS, config(output, fit="correction", overwrite=True))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def _kill(output: Path, stage: str) -> None:
    """A run in another process, killed at a stage."""
    program = "tests.training.repair.runs"
    command = [sys.executable, "-m", program, str(output), stage]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
