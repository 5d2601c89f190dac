"""Block fine-tuning end to end on tiny models: results, resuming after kill -9, bad data."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from blockattn_rag.engine import BlockAttentionEngine
from blockattn_rag.errors import DataError, UnsupportedModelError
from blockattn_rag.model import BlockModel
from blockattn_rag.training.config import LoraConfig
from blockattn_rag.training.data import SampleEncoder
from blockattn_rag.training.finetune import finetune
from blockattn_rag.training.masks import ModelMasks, TokenLayout, row_layout
from blockattn_rag.training.work import last_checkpoint
from tests.models import tiny_model, tiny_tokenizer
from tests.training.runs import config, settings, write_data, write_model

# peft asks transformers for an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny Llama in ``model`` and data in ``train.jsonl`` and ``eval.jsonl``."""
    write_model(tmp_path / "model")
    write_data(tmp_path / "train.jsonl")
    write_data(tmp_path / "eval.jsonl", count=1, seed=1)
    return tmp_path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


class TestResult:
    def test_training_lowers_the_loss_in_both_modes_and_documents_itself(
        self, folder: Path
    ) -> None:
        evaluated: dict[str, Any] = {"eval_data": [str(folder / "eval.jsonl")], "eval_steps": 6}
        report = finetune(config(settings(folder, **evaluated, epochs=4.0)))
        first, *_, last = [e for e in report.history if "eval_block_loss" in e]
        assert last["eval_block_loss"] < first["eval_block_loss"] - 0.5
        assert last["eval_full_loss"] < first["eval_full_loss"] - 0.5
        assert [e["step"] for e in report.history if "loss" in e][-1] == report.steps == 24
        output = folder / "out"
        card = (output / "README.md").read_text(encoding="utf-8")
        assert f"| block | {first['eval_block_loss']:.4f} | {last['eval_block_loss']:.4f} |" in card
        assert "| training | `train.jsonl` | 12 |" in card
        assert json.loads((output / "training_log.json").read_text()) == report.history
        assert (output / "training_curves.png").stat().st_size > 1000
        assert not (folder / "out.work").exists()

    def test_the_result_is_an_ordinary_model_that_is_known_to_be_block_tuned(
        self, folder: Path
    ) -> None:
        finetune(config(settings(folder, max_steps=1)))
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "out")
        marker = {"version": 1, "modes": ["block", "full"], "positions": "reordered"}
        assert loaded.config.block_attention == marker
        assert loaded.config.use_cache
        assert BlockModel.from_pretrained(folder / "out").is_block_tuned

    def test_full_mode_alone_leaves_no_mark(self, folder: Path) -> None:
        finetune(config(settings(folder, max_steps=1, modes=("full",))))
        assert not BlockModel.from_pretrained(folder / "out").is_block_tuned

    def test_adapters_load_by_path_with_a_mark_and_a_fingerprint_of_their_own(
        self, folder: Path
    ) -> None:
        finetune(config(settings(folder, max_steps=2, lora={"rank": 4})))
        assert not (folder / "out" / "model.safetensors").exists()
        base, tuned = (BlockModel.from_pretrained(folder / name) for name in ("model", "out"))
        assert tuned.is_block_tuned
        assert not base.is_block_tuned
        assert tuned.fingerprint != base.fingerprint

    @pytest.mark.parametrize(
        "changes",
        [
            {"modes": ("block",), "positions": "composite", "context_loss_weight": 0.3},
            {"packing": True, "attention": "sdpa", "group_by_length": False},
            {"gradient_checkpointing": True, "bf16": True, "lora": {"rank": 2}},
            {"blocks_per_turn": 3, "max_tokens": 900, "keep_checkpoints": True},
        ],
        ids=["no re-encoding", "packing", "bf16 with checkpointing", "cut turns"],
    )
    def test_options_run(self, folder: Path, changes: dict[str, Any]) -> None:
        report = finetune(config(settings(folder, max_steps=2, **changes)))
        assert report.steps == 2
        assert 0 < report.loss < 20

    def test_accumulating_and_packing_do_not_change_what_is_learned(self, folder: Path) -> None:
        results = []
        for name, changes in {
            "whole": {"per_device_batch_size": 4},
            "by one": {"per_device_batch_size": 1},
            "packed": {"per_device_batch_size": 4, "packing": True},
        }.items():
            finetune(config(settings(folder, name, max_steps=3, **changes)))
            results.append(weights(folder / name))
        for key, expected in results[0].items():
            for other in results[1:]:
                torch.testing.assert_close(other[key], expected, rtol=1e-3, atol=1e-5)


class TestResume:
    @pytest.mark.parametrize(
        ("family", "lora"), [("llama", None), ("qwen3", {"rank": 4})], ids=["llama", "qwen3-lora"]
    )
    def test_a_run_killed_and_resumed_ends_as_if_uninterrupted(
        self, tmp_path: Path, family: str, lora: dict[str, Any] | None
    ) -> None:
        write_model(tmp_path / "model", family)
        write_data(tmp_path / "train.jsonl")
        killed = settings(tmp_path, "killed", lora=lora)
        command = [sys.executable, "-m", "tests.training.runs", json.dumps(killed), "9"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert not (tmp_path / "killed").exists()
        with pytest.raises(FileExistsError, match="interrupted run"):
            finetune(config(killed))
        resumed = finetune(config({**killed, "resume": True}))
        whole = finetune(config(settings(tmp_path, "whole", lora=lora)))
        assert resumed.steps == whole.steps == 12
        assert resumed.loss == pytest.approx(whole.loss, rel=1e-4)
        found, expected = weights(tmp_path / "killed"), weights(tmp_path / "whole")
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)

    def test_a_half_written_checkpoint_is_passed_over(self, tmp_path: Path) -> None:
        for step, state in ((4, '{"global_step": 4}'), (12, '{"glob'), (8, None)):
            (tmp_path / f"checkpoint-{step}").mkdir()
            if state is not None:
                (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
        assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-4"]

    def test_resuming_with_other_settings_is_refused(self, folder: Path) -> None:
        (folder / "out.work").mkdir()
        (folder / "out.work" / "run.json").write_text("{}")
        with pytest.raises(ValueError, match=r"other settings for .*learning_rate"):
            finetune(config(settings(folder, resume=True)))


class TestRefusals:
    def test_bad_data_stop_the_run_and_leave_nothing(self, folder: Path) -> None:
        with (folder / "train.jsonl").open("a") as file:
            file.write('{"prompt": 3}\n')
        before = sorted(folder.iterdir())
        with pytest.raises(DataError, match="line 13"):
            finetune(config(settings(folder)))
        assert sorted(folder.iterdir()) == before

    def test_bad_data_may_be_left_out_of_the_run(self, folder: Path) -> None:
        with (folder / "train.jsonl").open("a") as file:
            file.write('{"prompt": 3}\n')
        report = finetune(config(settings(folder, max_steps=1, on_error="skip")))
        assert (report.train.samples, len(report.train.skipped)) == (12, 1)
        assert "| `train.jsonl` | 12 |" in (folder / "out" / "README.md").read_text()

    def test_data_without_a_usable_sample_are_refused(self, folder: Path) -> None:
        (folder / "train.jsonl").write_text("{}\n")
        with pytest.raises(DataError, match="no usable sample"):
            finetune(config(settings(folder, on_error="skip")))

    def test_an_existing_output_is_kept(self, folder: Path) -> None:
        (folder / "out").mkdir()
        with pytest.raises(FileExistsError, match="choose another output"):
            finetune(config(settings(folder)))

    def test_an_existing_output_is_replaced_if_asked(self, folder: Path) -> None:
        (folder / "out").mkdir()
        (folder / "out" / "old").touch()
        finetune(config(settings(folder, max_steps=1, overwrite=True)))
        assert not (folder / "out" / "old").exists()

    def test_a_model_that_cannot_be_cut_in_blocks_is_refused(self, folder: Path) -> None:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        write_model(folder / "dynamic", rope_parameters=rope)
        with pytest.raises(UnsupportedModelError, match="dynamic"):
            finetune(config(settings(folder, model=str(folder / "dynamic"))))

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"batch_size": 3}, "a multiple of 2"),
            ({"max_tokens": 10_000}, "the model holds 4096"),
            ({"modes": ()}, "modes"),
            ({"modes": ("blocks",)}, "modes"),
            ({"positions": "none"}, "positions"),
            ({"attention": "flash"}, "attention"),
            ({"on_error": "ignore"}, "on_error"),
            ({"context_loss_weight": 2.0}, "context_loss_weight"),
            ({"train_data": "a.jsonl"}, "a list of files"),
            ({"resume": True, "overwrite": True}, "exclude each other"),
        ],
    )
    def test_settings_that_make_no_sense_are_refused(
        self, folder: Path, changes: dict[str, Any], expected: str
    ) -> None:
        with pytest.raises(ValueError, match=expected):
            finetune(config(settings(folder, **changes)))

    def test_training_on_top_of_adapters_is_refused(self, folder: Path) -> None:
        (folder / "model" / "adapter_config.json").write_text("{}")
        with pytest.raises(ValueError, match="is a LoRA adapter"):
            finetune(config(settings(folder, lora={"rank": 4})))


@pytest.mark.parametrize("positions", ["reordered", "composite"])
@pytest.mark.parametrize("mode", ["block", "full"])
def test_training_computes_what_the_engine_computes(mode: Any, positions: Any) -> None:
    """The first token that the engine would answer, from training's tokens, positions and mask."""
    model: Any = tiny_model("llama")
    model.set_attn_implementation("eager")
    tokenizer = tiny_tokenizer()
    engine = BlockAttentionEngine.from_pretrained(tiny_model("llama"), tokenizer=tokenizer)
    for number in range(8):
        texts = [f"fact {number} is here. ", f"and {number * 7} there. ", f"what is {number}?"]
        record = {"blocks": texts[:-1], "prompt": texts[-1], "response": "x"}
        sample = SampleEncoder(tokenizer).encode_record(record)
        lengths = sample.block_lengths if mode == "block" else [len(sample.input_ids)]
        row = row_layout([lengths], len(sample.input_ids), positions)
        layout = TokenLayout(*(part[None] for part in row))
        mask = ModelMasks(model.config, "eager")(layout, torch.float32)
        ids = torch.tensor([sample.input_ids])
        with torch.no_grad():
            out = model(input_ids=ids, attention_mask=mask, position_ids=layout.position)
        answered = next(i for i, label in enumerate(sample.labels) if label != -100)
        expected = int(out.logits[0, answered - 1].argmax())
        found = engine.generate(texts, mode=mode, positions=positions, max_new_tokens=1)
        assert [*found.token_ids, *engine.model.end_token_ids][0] == expected


def test_lora_settings_default_to_all_linear_layers() -> None:
    assert LoraConfig().target_modules == "all-linear"
