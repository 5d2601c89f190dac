from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from blockattn_rag import Recipe
from blockattn_rag.app.rag.database import Manifest
from blockattn_rag.app.serving import server_options
from blockattn_rag.engine.recipe_files import RECIPE_FILE
from blockattn_rag.errors import ServingError, UnsupportedModelError
from blockattn_rag.model import BlockModel
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.profile import profile_of
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """Folder of a tiny model that the test may change."""
    monkeypatch.setenv("BLOCKATTN_RAG_HOME", str(tmp_path / "home"))
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return Manifest(str(tmp_path / "model"), store=str(tmp_path / "kv"), recipe="head:4")


def load(served: Manifest) -> BlockModel:
    return BlockModel.from_pretrained(served.model, device="cpu")


def recipe_text(served: Manifest, vllm_option: str | None = None) -> Any:
    return server_options(served, conflicting_option=vllm_option).connector["recipe"]


def test_options_lead_to_the_profile_of_the_model(served: Manifest) -> None:
    options = server_options(served)
    assert (options.source, options.dtype) == (served.model, "float32")
    assert options.connector == {
        "store": served.store,
        "recipe": "head:4",
        "fingerprint": load(served).fingerprint,
    }
    config = ServingConfig.parse(options.connector)
    profile, _ = config.profile_of(options.source, torch.float32)
    assert profile == profile_of(load(served), Recipe("head:4"))
    assert server_options(replace(served, dtype="bfloat16")).dtype == "bfloat16"
    more = server_options(replace(served, namespace="team", kv_dtype="int8")).connector
    assert (more["namespace"], more["kv_dtype"]) == ("team", "int8")


def test_a_model_from_the_hub_is_served_at_its_cached_commit(
    served: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--some--model"
    shutil.copytree(served.model, repository / "snapshots" / ("c" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    options = server_options(replace(served, model="some/model"))
    assert (options.source, options.revision) == ("some/model", "c" * 40)
    assert server_options(served).revision is None


def test_a_different_model_or_recipe_in_the_server_process_is_refused(
    served: Manifest, tmp_path: Path
) -> None:
    recipe_of(load(served)).save(tmp_path / "recipe")
    options = server_options(replace(served, recipe="auto"))
    config = ServingConfig.parse(options.connector)
    config.profile_of(options.source, torch.float32)
    other = ServingConfig.parse({**options.connector, "recipe": "head:3"})
    with pytest.raises(ServingError, match=r"The recipe of this process .* differs from the one"):
        other.profile_of(options.source, torch.float32)
    config = ServingConfig.parse({**server_options(served).connector})
    tiny_model(seed=1).save_pretrained(served.model)
    with pytest.raises(ServingError, match=r"The model of this process .* differs from the one"):
        config.profile_of(options.source, torch.float32)


def test_weights_are_not_loaded(served: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=AssertionError("loaded"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    assert server_options(served)


def test_auto_chooses_a_recipe_that_the_server_can_run(served: Manifest, tmp_path: Path) -> None:
    auto = replace(served, recipe="auto")
    assert recipe_text(auto) == "head+recompute:0.1"
    assert recipe_text(replace(auto, stock="head:2")) == "head:2"
    Recipe("head:3", promote=1, recompute=0.2).save(tmp_path / "recipe")
    assert recipe_text(auto) == "head:3+promote:1+recompute:0.2"


def test_a_recipe_with_an_adapter_is_copied(served: Manifest, tmp_path: Path) -> None:
    served = replace(served, recipe="auto")
    recipe = recipe_of(load(served))
    recipe.save(tmp_path / "recipe")
    folder = recipe_text(served)
    assert Path(folder).is_relative_to(tmp_path / "home")
    (Path(folder) / RECIPE_FILE).unlink()  # as if a process had died while writing it
    assert recipe_text(served) == folder
    assert Recipe.load(folder) == recipe
    recipe_of(load(served), size=0.3).save(tmp_path / "recipe")
    assert recipe_text(served) != folder
    assert Recipe.load(folder) == recipe


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("int4", "Unknown dtype 'int4': expected one of float32"),
        ("int8", "serve a quantized checkpoint of the model instead"),
    ],
)
def test_weights_that_vllm_cannot_load_are_refused(
    served: Manifest, dtype: str, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        server_options(replace(served, dtype=dtype))


def test_adapters_are_refused(served: Manifest) -> None:
    (Path(served.model) / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    with pytest.raises(UnsupportedModelError, match="merge it into its base"):
        server_options(replace(served, dtype="float32"))


def test_an_automatic_recipe_recomputes_nothing_if_vllm_cannot(
    served: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    auto = replace(served, recipe="auto")
    assert recipe_text(auto) == "head+recompute:0.1"
    assert recipe_text(auto, "--enable-lora") == "head"
    assert "because --enable-lora does not support it" in caplog.text
    named = replace(served, recipe="head+recompute:0.1")
    assert recipe_text(named, "--enable-lora") == "head+recompute:0.1"
