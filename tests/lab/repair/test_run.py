"""Complete repairs of a tiny model: results, reports, and recovery after a kill."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from blockattn_rag.engine import BlockAttentionEngine, Recipe
from blockattn_rag.engine.find_recipe import resolve_recipe
from blockattn_rag.errors import DataError
from blockattn_rag.lab.evaluation.metrics import contains_answer
from blockattn_rag.lab.repair import data, stages, student
from blockattn_rag.lab.repair.closed_form import no_correction
from blockattn_rag.lab.repair.compare import Comparer
from blockattn_rag.lab.repair.data import distinct_questions
from blockattn_rag.lab.repair.plan import RepairPlan, Speeds
from blockattn_rag.lab.repair.report import figures, plot
from blockattn_rag.lab.repair.stages import Repair
from blockattn_rag.lab.repair.student import ReadThroughStore
from blockattn_rag.lab.repair.teacher import Teacher
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import BLANK_LINE, PromptFormat
from blockattn_rag.store import MemoryStore
from tests import processes
from tests.lab.repair.runs import (
    FAST,
    PASSAGES,
    PROMPT,
    QUESTIONS,
    QUICK,
    block_model,
    material,
    nearest,
    repaired,
    run_and_die,
)
from tests.models import tiny_model, tiny_tokenizer
from tests.recording import recorded

SPEEDS = Repair.speeds
NAMES = ["none", "head:4", "head:4 + closed form", "head:4 + trained"]
SHARES = ["recompute 5 %", "recompute 10 %", "recompute 20 %"]


@pytest.fixture(autouse=True)
def equal_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans independent of the speed of the machine."""
    monkeypatch.setattr(Repair, "speeds", lambda *_: FAST)


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return block_model()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "recipe"


class Finished(NamedTuple):
    """Folder and recipe of a finished repair."""

    output: Path
    recipe: Recipe


@pytest.fixture(scope="module")
def finished(model: BlockModel, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    output = tmp_path_factory.mktemp("finished") / "recipe"
    with patch.object(Repair, "speeds", lambda *_: FAST):
        return Finished(output, repaired(model, output))


def measured_steps(report: Mapping[str, Any]) -> list[float]:
    return [entry["step"] for entry in report["curve"] if "eval_loss" in entry]


class TestResult:
    def test_the_best_recipe_is_saved(self, model: BlockModel, finished: Finished) -> None:
        output, recipe = finished
        assert recipe.adapter is not None
        assert recipe.sink == "head:4"
        assert recipe.fingerprints == (model.fingerprint,)
        assert (recipe.model, recipe.prompt_format) == ("tiny", "chat")
        assert Recipe.load(output) == recipe
        assert not output.with_name("recipe.work").exists()
        logits = {
            name: BlockAttentionEngine(model, recipe=given).answer_logits(PROMPT, [70, 80])
            for name, given in (("none", "none"), ("recipe", output))
        }
        full = BlockAttentionEngine(model).answer_logits(PROMPT, [70, 80], mode="full")
        assert (logits["recipe"] - full).norm() < 0.5 * (logits["none"] - full).norm()

    def test_measures_on_held_out_questions(self, finished: Finished) -> None:
        output, recipe = finished
        report = json.loads((output / "recipe.json").read_text("utf-8"))["report"]
        assert report == json.loads(json.dumps(recipe.report))
        names = [one["name"] for one in report["candidates"]]
        assert names[:4] == NAMES
        assert [name.rpartition(" + ")[2] for name in names[4:]] == SHARES
        assert list(report["shares"])[1:] == names[4:]
        assert report["chosen"] in report["shares"]
        assert (report["chosen_on"], report["measured_on"], report["questions"]) == (3, 3, 16)
        assert report["candidates"][0]["recovery"] is None
        assert 0 < report["candidates"][2]["recovery"]["mean"] <= 1
        assert report["plan"]["samples"] == 8
        assert measured_steps(report) == [0, 1, 2, 3]
        assert not report["written"]
        (plot,) = output.glob("report-*.png")
        assert plot.read_bytes().startswith(b"\x89PNG")

    def test_a_recipe_in_use_is_kept_unless_another_is_better(
        self, finished: Finished, model: BlockModel, output: Path
    ) -> None:
        """The time limit of this repair is too short for finding a better recipe."""
        good = finished.recipe
        hasty = replace(QUICK, samples=0, closed_form=2)
        kept = repaired(model, output, in_use=good, limits=hasty)
        assert "in use" in [one["name"] for one in kept.report["candidates"]]
        assert kept.adapter is not None
        assert figures(kept.report)[1].endswith(
            " There was no time to train the adapter. Increase --minutes and add --questions."
        )
        assert kept.adapter.digest == good.adapter.digest  # type: ignore[union-attr]

    def test_with_few_questions_no_adapter_is_fitted_and_the_default_is_kept(
        self, model: BlockModel, output: Path
    ) -> None:
        recipe = repaired(model, output, limits=replace(QUICK, fewest_to_choose=4), tolerance=0.0)
        report = recipe.report
        assert list(report["shares"]) == ["head + recompute 10 %", "head + recompute 20 %"]
        assert str(recipe) == "head+recompute:0.1"
        assert (report["chosen_on"], report["plan"]["closed_form"]) == (3, 0)
        assert not [one["name"] for one in report["candidates"] if "closed form" in one["name"]]
        assert " No adapter was fitted, which takes at least 64 questions" in figures(report)[1]

    def test_correct_answers_are_counted(self, model: BlockModel, tmp_path: Path) -> None:
        answers = ("zzzz", *map(chr, range(97, 122)))  # match any answer of the random model
        known = [replace(question, answers=answers) for question in QUESTIONS]
        report = repaired(model, tmp_path / "recipe", questions=known).report
        assert report["answered"] == 3
        assert report["right"].keys() == {"full", "block", "recipe"}
        engine = BlockAttentionEngine(model)
        teacher = Teacher(model, tmp_path / "answers", QUICK.answer_tokens, QUICK.top_k)
        decode = model.tokenizer.tokenizer.decode
        right = 0
        for sample in held_out(model, tmp_path / "again", report["plan"]["held_out"])[3:]:
            prompt = material(model).prompt(sample.text, sample.passages)
            text = decode(teacher(prompt).ids.tolist(), skip_special_tokens=True)
            assert (
                text
                == engine.generate(prompt, mode="full", max_new_tokens=QUICK.answer_tokens).text
            )
            right += int(contains_answer(text, answers))
        assert report["right"]["full"] == right
        assert figures(report)[3].startswith(f"Right answers: full {right}, block ")

    def test_without_matplotlib_there_is_a_warning_and_no_plot(
        self, finished: Finished, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert plot(finished.recipe.report) is None
        assert "Plot skipped, because it requires matplotlib" in caplog.text

    def test_models_that_cannot_recompute_tokens_get_recipes_without_it(
        self, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own_code = tiny_model("falcon", new_decoder_architecture=True, num_kv_heads=2, alibi=False)
        falcon = BlockModel(own_code, tiny_tokenizer(), name="tiny")
        assert not falcon.supports_relay
        planned = recorded(monkeypatch, RepairPlan, "for_time")
        report = repaired(falcon, output).report
        names = [candidate["name"] for candidate in report["candidates"]]
        assert [call.kwargs["recipes"] for call in planned] == [5]
        assert len(names) <= 5
        assert names[:3] == NAMES[:3]
        assert names[-1].endswith(" + promote 1")

    @pytest.mark.parametrize("tolerance", [0.0, 1.0])
    def test_the_tolerance_decides_what_a_recipe_may_cost(
        self, model: BlockModel, output: Path, tolerance: float
    ) -> None:
        recipe = repaired(model, output, tolerance=tolerance)
        shares = recipe.report["shares"]
        free, *costly = shares
        expected = free if tolerance == 0 else max(shares, key=lambda name: shares[name])
        assert recipe.report["chosen"] == expected
        by_name = dict(zip(shares, (0.0, 0.05, 0.1, 0.2), strict=True))
        assert recipe.recompute == by_name[expected]
        assert [name.rpartition(" + ")[2] for name in costly] == SHARES

    def test_training_is_skipped_if_an_adapter_does_not_help(
        self,
        model: BlockModel,
        output: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def useless(self: Any, asked: Any, rows: Any) -> Any:
            found = compare(self, asked, rows)
            return [replace(one, kl=9.0) if "closed" in one.mode else one for one in found]

        compare = Comparer.compare
        monkeypatch.setattr(Comparer, "compare", useless)
        stages: list[str] = []
        recipe = repaired(model, output, on_progress=lambda stage, *_: stages.append(stage))
        assert "An adapter does not improve tiny: on 3 questions, the divergence" in caplog.text
        assert "training" not in stages
        assert recipe.adapter is None
        assert recipe.report["plan"]["samples"] == 0

    def test_the_trained_adapter_is_the_best_measured_checkpoint(
        self, model: BlockModel, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(student, "LEARNING_RATE", 1.0)
        report = repaired(model, output).report
        losses = [entry["eval_loss"] for entry in report["curve"] if "eval_loss" in entry]
        trained = next(one for one in report["candidates"] if one["name"] == "head:4 + trained")
        # Measured on the same three questions, on a different path.
        assert trained["loss"] == pytest.approx(min(losses[1:]), rel=0.01)
        assert report["chosen"] != "head:4 + trained"


def held_out(model: BlockModel, work: Path, number: int) -> Any:
    plan = RepairPlan(number, 8, 8, 4, 1.0, 1.0)
    found = Repair(model, material(model), work, 60.0, QUICK, lambda *_: None)
    return found.samples(distinct_questions(QUESTIONS, 0), plan)[1]


class TestMaterial:
    def test_the_model_writes_questions_from_passages(
        self, model: BlockModel, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The tiny model writes no questions, so each output is replaced by one.
        numbers = count()
        monkeypatch.setattr(data, "clean_question", lambda _: f"what is {next(numbers)}?")
        many = [*PASSAGES, *(replace(one, title=f"more {one.title}") for one in PASSAGES)]
        report = repaired(model, output, questions=None, passages=many, nearest=nearest).report
        assert report["written"]
        assert report["questions"] == 12

    def test_the_lender_store_is_read_and_never_written(
        self, model: BlockModel, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lender = MemoryStore(1 << 26)
        engine = BlockAttentionEngine(model, lender, recipe="head:4", namespace="tenant")
        every = material(model).prompt("?", PASSAGES).context
        engine.precompute(every, as_prompt=True)
        before = set(lender.keys())
        encoded = recorded(monkeypatch, model, "encode")
        monkeypatch.setattr(
            stages, "fit_correction", lambda m, *_, **k: no_correction(m, k["sink"])
        )
        repaired(model, output, lender=lender, namespace="tenant")
        assert set(lender.keys()) == before
        # No passage was encoded again with the lender's sink. Recomputation uses a different sink.
        requests = [request for call in encoded for request in call.args[0]]
        assert not [request for request in requests if len(request.sink_ids) == 4]

    def test_rounded_lender_blocks_are_not_used(self, model: BlockModel, tmp_path: Path) -> None:
        lender = MemoryStore(1 << 26)
        BlockAttentionEngine(model, lender, recipe="head:4", kv_dtype="int8").encode(["a", "b"])
        BlockAttentionEngine(model, lender, recipe="head:4").encode(["c"])
        store = ReadThroughStore(tmp_path / "kv", 1 << 20, lender)
        keys = list(lender.keys())
        [exact] = [key for key in keys if lender.get(key).scales is None]  # type: ignore[union-attr]
        assert len(keys) == 3
        assert [key for key in keys if store.get(key) is not None] == [exact]
        found = zip(keys, store.get_many(keys), strict=True)
        assert [key for key, kv in found if kv is not None] == [exact]
        assert [key for key in keys if key in store] == [exact]

    @pytest.mark.parametrize(
        ("questions", "message"),
        [
            (QUESTIONS[:1], "Found 1 distinct questions, expected"),
            (QUESTIONS[:4], "Found 4 distinct questions, expected"),
            (None, "Found no questions or passages"),
        ],
    )
    def test_too_few_questions_are_refused(
        self, model: BlockModel, tmp_path: Path, questions: Any, message: str
    ) -> None:
        with pytest.raises(DataError, match=message):
            repaired(model, tmp_path / "recipe", questions=questions)
        assert list(tmp_path.iterdir()) == []

    def test_prompts_of_one_block_are_refused(self, output: Path) -> None:
        bare = PromptFormat("bare", "", "", "{text}", BLANK_LINE, "{question}")
        plain = tiny_tokenizer(chat=False)
        model = BlockModel(tiny_model(num_hidden_layers=2), plain, name="tiny")

        def prompt(question: str, passages: Any) -> Any:
            return bare.prompt(question, passages[:1], plain)

        with pytest.raises(DataError, match="a prompt with a single context block"):
            repaired(model, output, prompt=prompt)


class TestChecks:
    def test_a_block_fine_tuned_model_needs_no_recipe(self, output: Path) -> None:
        tuned = block_model()
        tuned.config.block_attention = {"version": 1}
        with pytest.raises(DataError, match="tiny is block-fine-tuned and needs no recipe"):
            repaired(tuned, output)

    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("note.txt", "mine", r"contains 'note.txt', .* \(--output\)"),
            ("recipe.json", '{"name": "pancakes"}', "not a recipe"),
        ],
    )
    def test_other_folders_are_not_replaced(
        self, model: BlockModel, output: Path, file: str, content: str, message: str
    ) -> None:
        output.mkdir()
        (output / file).write_text(content)
        with pytest.raises(DataError, match=message):
            repaired(model, output)
        assert [path.name for path in output.iterdir()] == [file]
        assert (output / file).read_text() == content

    def test_recipes_of_others_and_files_next_to_a_recipe_are_kept(
        self, model: BlockModel, output: Path
    ) -> None:
        Recipe("bos", fingerprints=("f" * 64,), model="other").save(output)
        with pytest.raises(DataError, match=r"contains a recipe for other \(fingerprints f{12}\)"):
            repaired(model, output)
        assert Recipe.load(output).sink == "bos"
        (output / "NOTES.md").write_text("mine")
        with pytest.raises(DataError, match=r"contains 'NOTES\.md'"):
            repaired(model, output)
        assert (output / "NOTES.md").read_text() == "mine"

    @pytest.mark.parametrize("damaged", [False, True])
    def test_an_earlier_recipe_is_replaced(
        self, model: BlockModel, output: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
    ) -> None:
        fitted = Recipe("head:4", fingerprints=(model.fingerprint,))
        monkeypatch.setattr(Repair, "run", lambda *_: (fitted, None))
        Recipe("bos").save(output)
        if damaged:
            (output / "recipe.json").write_bytes(b"")
        assert repaired(model, output) == fitted
        assert resolve_recipe(output, model, MemoryStore(1)) == fitted

    def test_too_little_time_is_reported_before_anything_else_is_computed(
        self, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The repair continues with the number of minutes that the error suggests."""
        slow = Speeds(answer=33.0, encode=25.0, fetch=25.0, step=20.0)
        monkeypatch.setattr(Repair, "speeds", lambda *_: slow)

        monkeypatch.setattr(stages, "write_questions", fails)
        asked: dict[str, Any] = {"questions": None, "passages": PASSAGES, "nearest": nearest}
        output = tmp_path / "recipe"
        with pytest.raises(DataError, match=r"found 10 minutes, expected at least (\d+)") as raised:
            repaired(model, output, minutes=10, **asked)
        assert list(tmp_path.iterdir()) == []
        found = re.search(r"--minutes (\d+)", str(raised.value))
        assert found is not None
        minutes = int(found[1])
        assert 15 < minutes < 30
        with pytest.raises(InterruptedError):
            repaired(model, output, minutes=minutes, **asked)
        with pytest.raises(DataError, match="There is too little time"):
            repaired(model, output, minutes=minutes - 1, **asked)

    def test_speeds_are_measured_with_short_prompts(
        self, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        computed = recorded(monkeypatch, Teacher, "compute")
        monkeypatch.setattr(Repair, "speeds", SPEEDS)
        long = [replace(one, text=one.text + 90 * " more") for one in PASSAGES]
        asked = replace(QUESTIONS[0], passages=tuple(long[:5]))
        limits = replace(QUICK, passages=5)
        made = Repair(model, material(model), tmp_path / "work", 60.0, limits, lambda *_: None)
        for _ in range(2):  # cached answers must not be measured
            found = made.speeds(asked)
            assert min(found.answer, found.encode, found.step) > 0
        prompt = material(model).prompt(asked.text, asked.passages)
        complete = len(model.tokenizer.prompt_ids(prompt).flat)
        lengths = [len(ids) for call in computed for ids in call.args[1]]
        warm_up, measured = lengths[:2]
        assert lengths == [warm_up, measured] * 2
        assert warm_up < 0.8 * measured < 0.5 * complete

    def test_a_full_disk_is_reported_before_anything_is_computed(
        self, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(OSError, match=r"Found 0.0 GB free .* of 6 passages"):
            repaired(model, tmp_path / "recipe", passages=PASSAGES)


def fails(*_: Any, **__: Any) -> None:
    raise InterruptedError


class TestInterruption:
    @pytest.mark.parametrize("stage", ["2", "comparing"])
    def test_a_killed_repair_resumes_with_the_same_result(
        self, finished: Finished, output: Path, stage: str
    ) -> None:
        killed = processes.run(run_and_die, output, stage)
        assert killed.status == -signal.SIGKILL, killed.stderr
        assert not output.exists()
        assert output.with_name("recipe.work").is_dir()
        recipe, expected = repaired(block_model(), output), finished.recipe
        assert recipe.report["chosen"] == expected.report["chosen"]
        assert recipe.adapter is not None
        assert expected.adapter is not None
        # The resumed teacher uses different batches, which changes the rounding.
        for found, tensors in zip(recipe.adapter.layers, expected.adapter.layers, strict=True):
            for one, other in zip(found, tensors, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        assert not output.with_name("recipe.work").exists()

    def test_finished_stages_are_not_repeated(
        self, model: BlockModel, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with patch.object(Recipe, "save", fails), pytest.raises(InterruptedError):
            repaired(model, output)
        for owner, name in ((Teacher, "compute"), (Comparer, "compare")):
            monkeypatch.setattr(owner, name, fails)
        for name in ("fit_correction", "train_correction"):
            monkeypatch.setattr(stages, name, fails)
        assert repaired(model, output).adapter is not None

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"questions": QUESTIONS[1:]}, r"questions \(16 \(sha256 .*, now 15 \(sha256"),
            ({"passages": PASSAGES}, r"passages \(0 \(sha256 .*, now 6 \(sha256"),
            ({"prompt_format": "other"}, r"prompt format \(chat, now other\)"),
        ],
    )
    def test_resuming_with_different_inputs_is_refused(
        self, model: BlockModel, output: Path, changes: dict[str, Any], message: str
    ) -> None:
        with patch.object(Repair, "closed_form", fails), pytest.raises(InterruptedError):
            repaired(model, output)
        with pytest.raises(DataError, match=f"other settings: {message}") as raised:
            repaired(model, output, **changes)
        assert "or delete that folder to start again" in str(raised.value)

    def test_different_minutes_are_refused_once_there_is_a_plan(
        self, model: BlockModel, output: Path
    ) -> None:
        slow = patch.object(Repair, "speeds", lambda *_: Speeds(60.0, 60.0, 60.0, 60.0))
        with slow, pytest.raises(DataError, match="too little time"):
            repaired(model, output, minutes=5)
        assert not output.with_name("recipe.work").exists()
        with patch.object(Repair, "closed_form", fails), pytest.raises(InterruptedError):
            repaired(model, output, minutes=20)
        message = "repair of 20 minutes, but --minutes is 30: pass the same"
        with pytest.raises(DataError, match=message):
            repaired(model, output, minutes=30)

    def test_after_too_little_time_more_minutes_allow_more_questions(
        self,
        model: BlockModel,
        output: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        numbers = count()
        monkeypatch.setattr(data, "clean_question", lambda _: f"what is {next(numbers)}?")
        many = [replace(one, title=f"{n} {one.title}") for one in PASSAGES for n in range(4)]
        asked: dict[str, Any] = {"questions": None, "passages": many, "nearest": nearest}

        def first_batch_alone(*args: Any) -> Any:
            times = chain([False], repeat(True))
            return write(*args[:-1], lambda: next(times))

        write: Any = data.write_questions
        with monkeypatch.context() as patched:
            patched.setattr(stages, "write_questions", first_batch_alone)
            # Simulates writing that took unusually long.
            patched.setattr(stages, "check_time", lambda *_: None)
            with pytest.raises(DataError, match=r"too little time .* 0.0 minutes are left"):
                repaired(model, output, minutes=0.01, **asked)
        assert f"All intermediate results are in {output.with_name('recipe.work')}" in caplog.text
        assert output.with_name("recipe.work").exists()
        report = repaired(model, output, minutes=20, **asked).report
        assert report["questions"] == 24

    def test_concurrent_repairs_with_the_same_output_are_refused(
        self, model: BlockModel, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def second(*_: Any) -> None:
            same: dict[str, Any] = {}
            for changes in (same, {"prompt_format": "other"}):
                with pytest.raises(DataError, match=r"is using .*recipe\.work") as told:
                    repaired(model, output, **changes)
                assert "delete" not in str(told.value)
            raise ZeroDivisionError

        monkeypatch.setattr(Repair, "closed_form", second)
        with pytest.raises(ZeroDivisionError):
            repaired(model, output)
        monkeypatch.setattr(Repair, "run", lambda *_: (Recipe("bos"), None))
        assert repaired(model, output).sink == "bos"

    def test_training_that_exceeds_its_time_ends_and_is_measured(
        self, model: BlockModel, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stages, "LATEST", 0.0)
        report = repaired(model, output).report
        assert measured_steps(report) == [0, 1]
