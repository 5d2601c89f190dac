"""End-to-end block fine-tuning of tiny models: results, resuming after kill -9, invalid data."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from blockattn_rag.check.oracle import oracle_logits
from blockattn_rag.engine import BlockAttentionEngine, Recipe
from blockattn_rag.errors import DataError, DivergedError, UnsupportedModelError
from blockattn_rag.lab.trainer import LabTrainer
from blockattn_rag.lab.training.batches import Collator, ModeDataset, ModelMasks, TokenLayout
from blockattn_rag.lab.training.data import SampleEncoder
from blockattn_rag.lab.training.finetune import check_folders, finetune
from blockattn_rag.lab.work import last_checkpoint, work_folder
from blockattn_rag.model import BlockModel
from blockattn_rag.model.loading import load_config
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.server.profile import profile_of
from tests.lab.training.runs import config, run_and_die, settings, tune, write_data, write_model
from tests.model.miniatures import model_of_kinds
from tests.models import tiny_model, tiny_tokenizer
from tests.processes import run

# peft uses an attribute that has been renamed in transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny Llama in ``model``, and data in ``train.jsonl`` and ``eval.jsonl``."""
    write_model(tmp_path / "model")
    write_data(tmp_path / "train.jsonl")
    write_data(tmp_path / "eval.jsonl", count=1, seed=1)
    return tmp_path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


class TestResult:
    def test_training_lowers_the_loss_in_both_modes_and_writes_a_card(self, folder: Path) -> None:
        evaluated: dict[str, Any] = {"eval_data": [str(folder / "eval.jsonl")], "eval_steps": 6}
        report = tune(folder, **evaluated, epochs=4.0)
        first, *_, last = [e for e in report.history if "eval_block_loss" in e]
        assert last["eval_block_loss"] < first["eval_block_loss"] - 0.5
        assert last["eval_full_loss"] < first["eval_full_loss"] - 0.5
        assert [e["step"] for e in report.history if "loss" in e][-1] == report.steps == 24
        output = folder / "out"
        card = (output / "README.md").read_text(encoding="utf-8")
        before, after = first["eval_block_loss"], last["eval_block_loss"]
        assert f"block mode {before:.4f} before, {after:.4f} after; full mode" in card
        assert "12 samples of " in card
        assert json.loads((output / "training_log.json").read_text()) == report.history
        assert (output / "training_curves.png").stat().st_size > 1000
        assert not (folder / "out.work").exists()

    def test_the_result_is_an_ordinary_model_marked_as_block_tuned(self, folder: Path) -> None:
        before = os.umask(0o027)
        try:
            tune(folder, max_steps=1)
        finally:
            os.umask(before)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "out")
        marker = {"version": 1, "modes": ["block", "full"], "positions": "reordered"}
        assert loaded.config.block_attention == {**marker, "sink": "none"}
        assert loaded.config.use_cache
        assert BlockModel.from_pretrained(folder / "out").is_block_tuned
        modes = {path.name: path.stat().st_mode & 0o777 for path in (folder / "out").iterdir()}
        assert set(modes.values()) == {0o640}, modes  # as the umask demands

    @pytest.mark.parametrize("sink", ["bos", "head:4"])
    def test_a_model_trained_with_a_sink_records_it(self, folder: Path, sink: str) -> None:
        plain = tune(folder, "plain", max_steps=1)
        report = tune(folder, max_steps=1, sink=sink)
        assert report.loss != plain.loss  # the sink affects training
        assert load_config(folder / "out").block_attention["sink"] == sink
        tuned = BlockModel.from_pretrained(folder / "out")
        assert BlockAttentionEngine(tuned).recipe.sink == sink
        assert profile_of(tuned).recipe.sink == sink

    def test_saved_adapters_have_their_own_mark_and_fingerprint(self, folder: Path) -> None:
        tune(folder, max_steps=2, lora=True, lora_rank=4)
        assert not (folder / "out" / "model.safetensors").exists()
        adapter = json.loads((folder / "out" / "adapter_config.json").read_text())
        assert (adapter["r"], adapter["lora_alpha"]) == (4, 8)
        base, tuned = (BlockModel.from_pretrained(folder / name) for name in ("model", "out"))
        assert tuned.is_block_tuned
        assert not base.is_block_tuned
        assert tuned.fingerprint != base.fingerprint

    def test_training_only_in_full_mode_leaves_no_mark(self, folder: Path) -> None:
        given: dict[str, Any] = {"model": "bundled", "lora": True, "max_steps": 1}
        tune(folder, **given, modes=("full",))
        tune(folder, "both", **given)
        assert not BlockModel.from_pretrained(folder / "out").is_block_tuned
        assert BlockModel.from_pretrained(folder / "both").is_block_tuned
        tune(folder, "full", max_steps=1, modes=("full",))
        assert not BlockModel.from_pretrained(folder / "full").is_block_tuned
        # peft finds the base model by its path. If the path is missing, we find it by name.
        adapter = folder / "both" / "adapter_config.json"
        written = json.loads(adapter.read_text())
        assert Path(written["base_model_name_or_path"]).is_dir()
        adapter.write_text(json.dumps({**written, "base_model_name_or_path": "/gone/model"}))
        assert BlockModel.from_pretrained(folder / "both").is_block_tuned
        assert load_config(folder / "both").num_hidden_layers == 4

    def test_warns_of_short_run(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        tune(folder, max_steps=3)
        assert "warm-up" not in caplog.text
        tune(folder, "short", max_steps=2)
        assert (
            "The run has 2 steps, but the warm-up has 2: the learning rate of 0.001" in caplog.text
        )
        caplog.clear()
        tune(folder, "flat", max_steps=2, lr_scheduler="constant")
        assert "warm-up" not in caplog.text

    @pytest.mark.parametrize(
        "changes",
        [
            {"modes": ("block",), "positions": "composite"},
            {"gradient_checkpointing": True, "bf16": True, "lora": True},
            {"blocks_per_turn": 3},
        ],
        ids=["no re-encoding", "bf16 with checkpointing", "cut turns"],
    )
    def test_training_supports_these_options(self, folder: Path, changes: dict[str, Any]) -> None:
        report = tune(folder, max_steps=2, **changes)
        assert report.steps == 2
        assert 0 < report.loss < 20

    def test_accumulation_does_not_change_the_weights(self, folder: Path) -> None:
        for name, size in (("whole", 4), ("by one", 1)):
            tune(folder, name, max_steps=3, per_device_batch_size=size)
        for key, expected in weights(folder / "whole").items():
            found = weights(folder / "by one")[key]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


class TestResume:
    @pytest.mark.parametrize(
        ("family", "lora"), [("llama", False), ("qwen3", True)], ids=["llama", "qwen3-lora"]
    )
    def test_killed_run_resumes_exactly(self, tmp_path: Path, family: str, lora: bool) -> None:
        write_model(tmp_path / "model", family)
        write_data(tmp_path / "train.jsonl")
        killed = settings(tmp_path, "killed", lora=lora)
        ended = run(run_and_die, killed, 9)
        assert ended.status == -signal.SIGKILL, ended.stderr
        assert not (tmp_path / "killed").exists()
        resumed = finetune(config(killed))
        whole = tune(tmp_path, "whole", lora=lora)
        assert resumed.steps == whole.steps == 12
        assert resumed.loss == pytest.approx(whole.loss, rel=1e-4)
        found, expected = weights(tmp_path / "killed"), weights(tmp_path / "whole")
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)

    def test_a_half_written_checkpoint_is_skipped(self, tmp_path: Path) -> None:
        for step, state in ((4, '{"global_step": 4}'), (12, '{"glob'), (8, None)):
            (tmp_path / f"checkpoint-{step}").mkdir()
            if state is not None:
                (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-4"]

    @pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
    def test_a_completed_training_is_not_repeated(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
    ) -> None:
        # After a complete epoch there would be no further step to resume.
        short: dict[str, Any] = {"epochs": 0.5, "lr_scheduler": "constant", "lora": lora}
        with monkeypatch.context() as patched:
            patched.setattr("blockattn_rag.lab.training.finetune.publish", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                tune(folder, **short)
        resumed = tune(folder, **short)
        whole = tune(folder, "whole", **short)
        assert resumed.steps == whole.steps == 3
        assert resumed.history == whole.history
        for name, tensor in weights(folder / "whole").items():
            torch.testing.assert_close(weights(folder / "out")[name], tensor, rtol=0, atol=0)

    @pytest.mark.parametrize(("file", "name"), [("train", "training"), ("eval", "evaluation")])
    def test_resuming_with_other_data_is_refused(self, folder: Path, file: str, name: str) -> None:
        wanted = settings(folder, eval_data=[str(folder / "eval.jsonl")])
        noted = check_folders(config(wanted))
        (folder / "out.work").mkdir()
        (folder / "out.work" / "run.json").write_text(json.dumps(noted))
        write_data(folder / f"{file}.jsonl", seed=9)
        with pytest.raises(DataError, match=rf"other settings: {name} data \("):
            finetune(config(wanted))

    @pytest.mark.parametrize(
        ("noted", "message"),
        [
            ('{"model": "m", "training data": []}', "other settings: .*learning_rate"),
            *((text, r"run\.json is damaged .* start again") for text in ("", "null", "[1]")),
        ],
    )
    def test_resume_needs_the_same_settings(self, folder: Path, noted: str, message: str) -> None:
        (folder / "out.work").mkdir()
        (folder / "out.work" / "run.json").write_text(noted)
        with pytest.raises(DataError, match=message):
            tune(folder)


class TestRefusals:
    def test_invalid_data_stops_the_run_and_leaves_no_files(self, folder: Path) -> None:
        with (folder / "train.jsonl").open("a") as file:
            file.write('{"prompt": 3}\n')
        before = sorted(folder.iterdir())
        with pytest.raises(DataError, match="line 13"):
            tune(folder)
        (folder / "train.jsonl").write_text("\n")
        with pytest.raises(DataError, match="Found no sample"):
            tune(folder)
        assert sorted(folder.iterdir()) == before

    @pytest.mark.parametrize("kind", ["folder", "file", "link"])
    def test_an_existing_output_is_not_overwritten(self, folder: Path, kind: str) -> None:
        out = folder / "out"
        if kind == "folder":
            out.mkdir()
        elif kind == "file":
            out.touch()
        else:
            out.symlink_to(folder / "nowhere")
        with pytest.raises(FileExistsError, match="out already exists; delete it"):
            tune(folder)
        assert os.path.lexists(out)
        assert not (folder / "out.work").exists()

    def test_an_output_created_during_the_run_and_the_result_are_both_kept(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out, step = folder / "out", LabTrainer.training_step

        def noting(self: LabTrainer, *args: Any, **options: Any) -> Any:
            out.mkdir(exist_ok=True)
            return step(self, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(LabTrainer, "training_step", noting)
            with pytest.raises(FileExistsError, match="out already exists"):
                tune(folder, max_steps=1)
        assert not list(out.iterdir())
        out.rmdir()
        monkeypatch.setattr(LabTrainer, "training_step", lambda *_, **__: 1 / 0)
        assert tune(folder, max_steps=1).steps == 1
        assert BlockModel.from_pretrained(out).is_block_tuned

    def test_a_run_in_progress_is_reported(self, folder: Path) -> None:
        work = folder / "out.work"
        with (
            work_folder(work, {"model": "m", "training data": []}, lambda _: False),
            pytest.raises(DataError, match=r"Another run is using .*out\.work"),
        ):
            tune(folder, max_steps=1)

    @pytest.mark.parametrize("noted", ['{"tool": "other"}', "[1]", "thesis", None])
    def test_a_work_folder_of_another_tool_is_kept(self, folder: Path, noted: str | None) -> None:
        work = folder / "out.work"
        (work / "photos").mkdir(parents=True)
        files = {"photos/cat.png": "mine", "thesis.txt": "mine"}
        files |= {"run.json": noted} if noted is not None else {}
        for name, text in files.items():
            (work / name).write_text(text)
        with pytest.raises((FileExistsError, DataError), match=r"out\.work.*move or delete"):
            tune(folder, max_steps=1)
        assert {name: (work / name).read_text() for name in files} == files

    def test_a_failed_run_leaves_no_files(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = sorted(folder.iterdir())
        with monkeypatch.context() as patched:
            patched.setattr(LabTrainer, "training_step", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                tune(folder)
        assert sorted(folder.iterdir()) == before

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"max_steps": 3}, "loss is nan at step"),
            ({"max_steps": 1}, "weights are NaN or infinite"),
        ],
        ids=["loss", "weights"],
    )
    def test_diverging_training_raises(
        self, folder: Path, changes: dict[str, Any], expected: str
    ) -> None:
        far: dict[str, Any] = {"learning_rate": 1e38, "warmup_steps": 0}
        with pytest.raises(DivergedError, match=expected):
            tune(folder, **far, **changes)
        assert not (folder / "out").exists()

    def test_block_mode_without_any_context_is_refused(self, folder: Path) -> None:
        turns = [{"role": "user", "content": "A?\n\nB?"}, {"role": "assistant", "content": "C."}]
        (folder / "train.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
        with pytest.raises(DataError, match="No sample has a context"):
            tune(folder)
        tune(folder, "full", max_steps=1, modes=("full",))
        report = tune(folder, "cut", max_steps=1, blocks_per_turn=2)
        assert report.train.with_context == 1

    def test_samples_without_context_cause_a_warning(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        tune(folder, max_steps=1)
        assert "have a context" not in caplog.text
        with (folder / "train.jsonl").open("a") as file:
            file.write('{"blocks": [], "prompt": "a", "response": "b"}\n' * 20)
        tune(folder, "more", max_steps=1)
        assert "Only 12 of 32 samples have a context" in caplog.text

    def test_an_unsupported_model_is_refused(self, folder: Path) -> None:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        write_model(folder / "dynamic", rope_parameters=rope)
        with pytest.raises(UnsupportedModelError, match="dynamic"):
            tune(folder, model=str(folder / "dynamic"))

    def test_a_hybrid_model_is_refused_in_block_mode(self, folder: Path) -> None:
        model = model_of_kinds("state")
        model.hf_model.save_pretrained(folder / "hybrid")
        model.tokenizer.tokenizer.save_pretrained(folder / "hybrid")
        with pytest.raises(UnsupportedModelError, match="hybrid model"):
            tune(folder, model=str(folder / "hybrid"))

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"batch_size": 3}, "a multiple of 2"),
            ({"modes": ("blocks",)}, "Invalid modes"),
            ({"modes": ("block", "block")}, "expected distinct values"),
            ({"positions": "none"}, "Unknown positions"),
            ({"sink": "tail"}, "Unknown sink 'tail': expected 'none', 'bos', 'head', or 'head:N'"),
            ({"sink": "bos", "modes": ("full",)}, "The sink 'bos' requires block mode"),
            ({"sink": "head:999"}, "the head of a prompt has"),
            ({"train_data": "a.jsonl"}, "a list of files"),
            ({"epochs": 0.0}, "Invalid epochs 0.0: expected more than 0"),
            ({"learning_rate": math.nan}, "Invalid learning_rate nan"),
            ({"adam_beta2": 1.0}, "expected adam_beta2 below 1"),
            ({"batch_size": 0}, "Invalid batch_size 0: expected 1 or more"),
            ({"lora_rank": 0}, "Invalid lora_rank 0: expected 1 or more"),
            ({"seed": 2**32}, "seed below 4294967296"),
            ({"lr_scheduler": "cosine_with_min_lr"}, "Unknown lr_scheduler .*: expected one of"),
        ],
    )
    def test_invalid_settings_are_refused(
        self, folder: Path, changes: dict[str, Any], expected: str
    ) -> None:
        with pytest.raises(ValueError, match=expected):
            tune(folder, **changes)

    @pytest.mark.parametrize("output", ["", ".", "..", "a/.."])
    def test_an_output_without_a_name_is_refused(self, folder: Path, output: str) -> None:
        with pytest.raises(ValueError, match="expected the name of a folder"):
            config({**settings(folder), "output": output})

    def test_lora_needs_peft(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(ImportError, match=r"LoRA needs peft, which is not .*\[train\]"):
            tune(folder, lora=True)

    def test_training_on_top_of_adapters_is_refused(self, folder: Path) -> None:
        (folder / "model" / "adapter_config.json").write_text("{}")
        with pytest.raises(ValueError, match="is a LoRA adapter"):
            tune(folder, lora=True)


@pytest.mark.parametrize("positions", ["reordered", "composite"])
@pytest.mark.parametrize("sink", ["none", "bos", "head:3"])
def test_training_logits_with_a_sink_equal_engine_and_oracle(sink: str, positions: Any) -> None:
    model: Any = tiny_model("llama")
    model.set_attn_implementation("eager")
    encoder = SampleEncoder(tiny_tokenizer())
    texts = ["You answer.", "fact 1 is here. ", "and 7 there. ", "what is 1?"]
    record = {"blocks": texts[:-1], "prompt": texts[-1], "response": "xyz"}
    sample = dataclasses.asdict(encoder.encode_record(record))
    before = sink_ids(sink, encoder.tokenizer)
    item = ModeDataset([sample], ["block"], positions, before)[0]
    logits = logits_of(model, Collator(0)([item]))
    answer = [label for label in item["labels"] if label != -100]
    found = logits[-len(answer) - 1 : -1]
    engine = BlockAttentionEngine.from_pretrained(tiny_model("llama"), tokenizer=tiny_tokenizer())
    expected = engine.answer_logits(texts, answer, recipe=Recipe(sink, positions=positions))
    # Tolerance for float32 logits.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if positions == "reordered":
        ids = encoder.tokenizer.prompt_ids(encoder.parse(record).prompt)
        blocks = [*ids.context, [*ids.final, *answer[:-1]]]
        expected = oracle_logits(model, blocks, before)
        torch.testing.assert_close(found, expected[-len(answer) :], rtol=1e-4, atol=1e-4)


def logits_of(model: Any, batch: Any) -> torch.Tensor:
    """Compute the logits of one item as in training."""
    layout = TokenLayout(*(batch[name] for name in TokenLayout._fields))
    mask = ModelMasks(model.config, "eager")(layout, torch.float32)
    with torch.no_grad():
        out: torch.Tensor = model(
            input_ids=batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"]
        ).logits[0]
    return out
