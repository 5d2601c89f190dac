"""Known checkpoints: prompt formats, detection and requirements."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.lab.training.config import FinetuneConfig
from blockattn_rag.model import BlockModel
from blockattn_rag.model.loading import load_tokenizer
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.checkpoints import (
    CHECKPOINTS,
    format_for,
    known_checkpoint,
    other_switches,
)
from blockattn_rag.prompts.formats import FORMATS
from blockattn_rag.prompts.tokenization import BlockTokenizer
from tests.models import shared_tiny_llama, tiny_tokenizer

TULU, LLAMA = "ldsjmdy/Tulu3-Block-FT", "hxia7/Llama-3.2-1B-Block-FT"


def named(name: str) -> BlockModel:
    return BlockModel(shared_tiny_llama(), tiny_tokenizer(), name=name, pack_weights=False)


@pytest.mark.parametrize(
    "name",
    [
        TULU,
        TULU.lower(),
        f"/models/{TULU}",
        "/cache/hub/models--ldsjmdy--Tulu3-Block-FT/snapshots/0a1b2c",
    ],
)
def test_checkpoints_and_their_copies_are_recognized(name: str) -> None:
    assert known_checkpoint(name) is CHECKPOINTS[TULU]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "bundled",
        "Tulu3-Block-FT",
        "/models/Tulu3-Block-FT",
        "somebody/Tulu3-Block-FT",
        f"{TULU}-medical",
        f"{TULU}/checkpoint-100",
        "/cache/models--somebody--Tulu3-Block-FT/snapshots/0a1b2c",
        "/cache/models--ldsjmdy--Tulu3-Block-FT/other/0a1b2c",
    ],
)
def test_models_with_other_names_are_not_recognized(name: str) -> None:
    assert known_checkpoint(name) is None
    assert format_for("auto", name) is FORMATS["chat"]


def test_a_format_that_was_not_confirmed_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert format_for("auto", "hxia7/Llama-3.1-8B-Block-FT") is FORMATS["llama3-block"]
    assert format_for("auto", "hxia7/Qwen3-8B-Block-FT") is FORMATS["chat"]
    assert "(unconfirmed); see its model card" in caplog.messages[0]
    assert "trained with is unknown; see its model card" in caplog.messages[1]


def test_an_explicit_format_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert format_for("turborag", TULU) is FORMATS["turborag"]
    assert format_for(FORMATS["chat"], TULU) is FORMATS["chat"]
    assert not caplog.messages


def test_fine_tuning_records_the_format_that_auto_resolves_to() -> None:
    tuned = FinetuneConfig(LLAMA, "out", ["data.jsonl"])
    assert tuned.prompt_format == "llama3-block" == tuned.decisive()["prompt_format"]
    assert FinetuneConfig("bundled", "out", ["data.jsonl"]).prompt_format == "chat"


def test_known_checkpoints_are_block_tuned_and_control_models_are_not() -> None:
    assert named(TULU).is_block_tuned
    assert named(TULU).checkpoint is CHECKPOINTS[TULU]
    assert not named("ldsjmdy/Tulu3-RAG").is_block_tuned
    assert not named("elsewhere/Tulu3-Block-FT").is_block_tuned


def test_fine_tuned_versions_of_a_checkpoint_are_not_recognized() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["k_proj"])
    adapted: Any = peft.get_peft_model(copy.deepcopy(shared_tiny_llama()), lora)
    ours = copy.deepcopy(shared_tiny_llama())
    ours.config.block_attention = {"version": 1}
    for model in (adapted, ours):
        assert BlockModel(model, tiny_tokenizer(), name=TULU).checkpoint is None


@pytest.mark.parametrize(("model", "bos"), [(TULU, False), (LLAMA, True)])
def test_bos_follows_the_checkpoint(model: str, bos: bool, tmp_path: Path) -> None:
    folder = tmp_path / model
    shared_tiny_llama().config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    assert bool(BlockTokenizer(load_tokenizer(folder)).prefix_ids) == bos


def test_settings_that_differ_from_training_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    prompt = BlockPrompt.from_texts(["One.", "Two."])
    model = BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer(), name=LLAMA)
    BlockAttentionEngine(model).generate(prompt, max_new_tokens=1)
    assert not caplog.messages
    BlockAttentionEngine(model, recipe="head:4").generate(prompt, max_new_tokens=1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "sink='none', found positions='reordered' and sink='head:4'" in caplog.messages[0]


def test_checkpoints_have_the_format_and_settings_that_they_were_trained_with() -> None:
    assert {name: known.format for name, known in CHECKPOINTS.items()} == {
        TULU: "tulu3-block",
        "ldsjmdy/Tulu3-RAG": "tulu3-block",
        LLAMA: "llama3-block",
        "hxia7/Llama-3.1-8B-Block-FT": "llama3-block",
        "hxia7/Llama-3-8B-block": "llama3-block",
        "hxia7/Qwen3-8B-Block-FT": None,
    }
    used = {"positions": Recipe().positions, "sink": Recipe().sink}
    for known in CHECKPOINTS.values():
        assert not other_switches(known.hub_id, known.switches, used)
