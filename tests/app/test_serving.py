"""What a server needs of a model, measured once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from blockattn_rag import Recipe
from blockattn_rag.app import serving
from blockattn_rag.app.serving import Served, profile_file
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model import BlockModel
from blockattn_rag.server.profile import ModelProfile, profile_of
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A tiny model of this test's own."""
    monkeypatch.setenv("BLOCKATTN_RAG_HOME", str(tmp_path / "home"))
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return Served(model=str(tmp_path / "model"), store=str(tmp_path / "kv"), recipe="head:4")


def test_profile_is_measured_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    file = profile_file(served)
    model = BlockModel.from_pretrained(served.model, device="cpu")
    assert ModelProfile.read(file) == profile_of(model, Recipe("head:4"))
    others = [
        profile_file(replace(served, recipe="none")),
        profile_file(replace(served, dtype="bfloat16")),
    ]
    assert ModelProfile.read(others[1]).dtype == "bfloat16"
    with monkeypatch.context() as patched:
        patched.setattr(serving, "_measure", None)
        assert profile_file(served) == file
    os.utime(Path(served.model) / "model.safetensors", (1, 1))
    assert profile_file(served) not in (file, *others)


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_weights_that_are_quantized_in_process_are_refused(served: Served, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"dtype='{dtype}' quantizes the weights in this process"):
        profile_file(replace(served, dtype=dtype))


def test_auto_is_what_the_server_can_run(served: Served, tmp_path: Path) -> None:
    auto = replace(served, recipe="auto")
    assert str(ModelProfile.read(profile_file(auto)).recipe) == "head:4"
    earlier = replace(auto, stock="head:2")
    assert str(ModelProfile.read(profile_file(earlier)).recipe) == "head:2"
    Recipe("head:3", promote=1, recompute=0.2).save(tmp_path / "recipe")
    assert str(ModelProfile.read(profile_file(auto)).recipe) == "head:3+promote:1"
    with pytest.raises(ValueError, match="a server cannot recompute tokens"):
        profile_file(replace(served, recipe="recompute:0.1"))


def test_a_recipe_next_to_the_store_is_part_of_the_profile(served: Served, tmp_path: Path) -> None:
    served = replace(served, recipe="auto")
    file = profile_file(served)
    model = BlockModel.from_pretrained(served.model, device="cpu")
    replace(recipe_of(model), adapter=None, sink="head:2").save(tmp_path / "recipe")
    assert ModelProfile.read(profile_file(served)).sink == "head:2" != ModelProfile.read(file).sink
    assert "recipe" not in served.connector(profile_file(served))
    recipe = recipe_of(model)
    recipe.save(tmp_path / "recipe")
    options = served.connector(profile_file(served))
    assert ModelProfile.read(options["profile"]).recipe == recipe.outline
    assert Recipe.load(options["recipe"]) == recipe


def test_a_profile_with_an_adapter_needs_its_recipe(served: Served, tmp_path: Path) -> None:
    model = BlockModel.from_pretrained(served.model, device="cpu")
    profile = tmp_path / "profile.json"
    profile_of(model, recipe_of(model)).write(profile)
    with pytest.raises(ValueError, match="pass the folder of that recipe as --recipe"):
        replace(served, recipe="auto").connector(profile)
    recipe_of(model).save(tmp_path / "recipe")
    options = replace(served, recipe="auto").connector(profile)
    assert Recipe.load(options["recipe"]).outline == ModelProfile.read(profile).recipe


def test_refuses_adapters(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (Path(served.model) / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    with pytest.raises(UnsupportedModelError, match="merge it into its base"):
        profile_file(served)
