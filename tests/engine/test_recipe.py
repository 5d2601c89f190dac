"""Recipes: values, folders, and the choice of the recipe for a model."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from blockattn_rag import BlockAttentionEngine, DirectoryStore, Recipe, open_store
from blockattn_rag.engine.find_recipe import known_digests, resolve_recipe
from blockattn_rag.engine.outline import STOCK, RecipeOutline
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import Correction
from blockattn_rag.prompts.blocks import Block
from tests.model.miniatures import new_model
from tests.models import shared_tiny_llama, tiny_model, tiny_tokenizer
from tests.recipes import correction_of, recipe_of

SMOLLM2 = "ef69aaa49fa9721982f7b16beae2b72c6a3c90f5b14c1ce4f2a7aad31eaf91c0"


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(shared_tiny_llama(), tiny_tokenizer(), name="tiny")


@pytest.fixture
def stock() -> BlockModel:
    """A new stock model, for which no warning has been logged yet."""
    return BlockModel(tiny_model(seed=1), tiny_tokenizer(), name="stock")


def changed(folder: Path, **fields: Any) -> Path:
    """Change fields in the recipe.json of a folder."""
    told = json.loads((folder / "recipe.json").read_bytes())
    (folder / "recipe.json").write_text(json.dumps({**told, **fields}), "utf-8")
    return folder


# -- values ------------------------------------------------------------------------------------


def test_recipes_are_compared_by_what_affects_answers(model: BlockModel) -> None:
    one, other = recipe_of(model), recipe_of(model, report={"kl": 0.1}, source="elsewhere")
    assert one.adapter is not other.adapter
    assert one == other
    assert hash(one) == hash(other)
    assert one.digest == other.digest
    for unlike in (
        replace(one, promote=1),
        replace(one, recompute=0.1),
        replace(one, positions="composite"),
        recipe_of(model, size=0.2),
        recipe_of(model, sink="bos"),
    ):
        assert unlike != one
        assert unlike.digest != one.digest


def test_a_recipe_without_recomputation_keeps_its_digest() -> None:
    # Computed by the last version without recomputation.
    digest = "a98d6109132d0dc8b945f3853fdaf995479d375de3195828384c79203724be16"
    assert Recipe("bos").digest == digest


@pytest.mark.parametrize("kind", [Recipe, RecipeOutline])
@pytest.mark.parametrize(("share", "equal"), [(-0.0, 0.0), (1, 1.0), (0, -0.0)])
def test_equal_shares_have_equal_digests(kind: Any, share: float, equal: float) -> None:
    one, other = kind("bos", recompute=share), kind("bos", recompute=equal)
    assert one == other
    assert one.digest == other.digest
    assert str(one) == str(other)
    assert getattr(one, "outline", one).digest == getattr(other, "outline", other).digest


def test_recipes_with_and_without_promotion_share_stored_passages(model: BlockModel) -> None:
    recipe = recipe_of(model)
    engine = BlockAttentionEngine(model, recipe=recipe)
    engine.encode(["Halden is tall."])
    for other, reused in ((replace(recipe, promote=2), 1), (recipe_of(model, size=0.2), 0)):
        assert engine.precompute([Block("Halden is tall.")], recipe=other).reused == reused


def test_the_text_form_of_a_recipe_is_short(model: BlockModel) -> None:
    recipe = recipe_of(model, promote=1)
    assert recipe.adapter is not None
    assert str(recipe) == f"head:4+adapter:{recipe.adapter.digest[:6]}+promote:1"
    assert str(Recipe("bos", recompute=0.125)) == "bos+recompute:0.125"
    assert str(Recipe("bos", positions="composite")) == "bos+positions:composite"
    assert str(Recipe()) == "none"
    assert "tensor" not in repr(recipe)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sink": "heads"}, "head:N"),
        ({"sink": "first-block"}, "head:N"),
        ({"promote": -1}, "number of passages"),
        ({"promote": True}, "number of passages"),
        ({"promote": 1.0}, "number of passages"),
        ({"recompute": -0.1}, "share of the tokens, from 0 to 1"),
        ({"recompute": 10}, "share of the tokens, from 0 to 1"),
        ({"recompute": True}, "share of the tokens, from 0 to 1"),
        ({"recompute": float("nan")}, "share of the tokens, from 0 to 1"),
        ({"recompute": 0.1, "positions": "composite"}, "requires positions='reordered'"),
        ({"positions": "none"}, "'reordered' or 'composite'"),
        ({"fingerprints": "abc"}, "tuple of strings"),
        ({"fingerprints": (1,)}, "expected strings"),
        ({"model": None}, "expected a string"),
        ({"adapter": "kv.safetensors"}, "expected a Correction"),
    ],
)
def test_invalid_values_are_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises((ValueError, TypeError), match=expected):
        Recipe(**fields)


def test_an_adapter_needs_a_sink_and_a_model(model: BlockModel) -> None:
    adapter = correction_of(model, sink="bos")
    with pytest.raises(ValueError, match="fitted with sink='bos', found sink='head:4'"):
        Recipe("head:4", adapter, fingerprints=(model.fingerprint,))
    with pytest.raises(ValueError, match="requires the fingerprints"):
        Recipe("bos", adapter)


# -- folders -----------------------------------------------------------------------------------


def test_a_saved_recipe_is_loaded_unchanged(model: BlockModel, tmp_path: Path) -> None:
    recipe = recipe_of(model, promote=1, prompt_format="chat", report={"kl": 0.06})
    recipe.save(tmp_path / "db" / "recipe", plot=b"png")
    found = Recipe.load(tmp_path / "db" / "recipe")
    assert found == recipe
    assert found.digest == recipe.digest
    assert found.report == {"kl": 0.06}
    assert found.source == str(tmp_path / "db" / "recipe")
    (plot,) = (tmp_path / "db" / "recipe").glob("report-*.png")
    assert plot.read_bytes() == b"png"
    assert [one.name for one in (tmp_path / "db").iterdir()] == ["recipe"]


def test_the_share_to_recompute_is_saved(tmp_path: Path) -> None:
    Recipe("head:4", recompute=0.1).save(tmp_path / "recipe")
    assert Recipe.load(tmp_path / "recipe") == Recipe("head:4", recompute=0.1)
    with pytest.raises(ValueError, match="found digest"):
        Recipe.load(changed(tmp_path / "recipe", recompute=0.2))


def test_saving_through_a_link_replaces_its_target(tmp_path: Path) -> None:
    Recipe("bos").save(tmp_path / "recipe")
    link = tmp_path / "link"
    link.symlink_to("recipe")
    Recipe("head:4").save(link)
    assert link.is_symlink()
    assert Recipe.load(tmp_path / "recipe").sink == "head:4"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "recipe"]


def test_a_save_that_fails_leaves_the_old_recipe(model: BlockModel, tmp_path: Path) -> None:
    Recipe("bos").save(tmp_path / "recipe")
    with pytest.raises(ValueError):
        recipe_of(model, report={"kl": float("nan")}).save(tmp_path / "recipe")
    assert Recipe.load(tmp_path / "recipe") == Recipe("bos")
    assert [one.name for one in tmp_path.iterdir()] == ["recipe"]


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none", "head"):
        with pytest.raises(ValueError, match="Found no recipe at"):
            Recipe.load(place)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"version": 2}, "version 2, expected 3"),
        ({"version": True}, "version True, expected 3"),
        ({"version": 3.0}, "version 3.0, expected 3"),
        ({"promote": 1}, "found digest"),
        ({"promote": -1}, "number of passages"),
        ({"promote": True}, "promote: .* valid integer, found True"),
        ({"promote": 1.0}, "promote: .* valid integer, found 1.0"),
        ({"recompute": False}, "recompute: .* valid number, found False"),
        ({"sink": 4}, "sink: .* valid string, found 4"),
        ({"adapter": 1}, "adapter: .* valid string, found 1"),
        ({"digest": None}, "digest: .* valid string, found None"),
        ({"fingerprints": "abc"}, "fingerprints: .* valid list, found 'abc'"),
        ({"fingerprints": [1]}, "fingerprints.0: .* valid string, found 1"),
        ({"targets": None}, "targets: Unexpected keyword argument"),
        ({"adapter": None}, "found digest"),
        ({"report": []}, "report: .* valid dictionary"),
        ({"files": {}}, "files: .* valid list"),
        ({"files": []}, r"found files \[\], expected adapter-"),
        ({"files": ["adapter-../cat.png"]}, "found files"),
        ({"files": [f"adapter-{16 * '0'}.safetensors"]}, "the file is missing"),
    ],
)
def test_changed_fields_are_refused(
    model: BlockModel, tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    recipe_of(model).save(tmp_path / "recipe")
    with pytest.raises(ValueError, match=expected):
        Recipe.load(changed(tmp_path / "recipe", **fields))


def test_every_flipped_bit_of_an_adapter_is_detected(model: BlockModel, tmp_path: Path) -> None:
    recipe_of(model).save(tmp_path / "recipe")
    (path,) = (tmp_path / "recipe").glob("adapter-*.safetensors")
    data = path.read_bytes()
    for at in range(0, len(data), len(data) // 50):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ValueError, match="is damaged: found SHA-256"):
            Recipe.load(tmp_path / "recipe")


def test_auto_uses_the_bundled_recipe(stock: BlockModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of SmolLM2-135M-Instruct."""
    monkeypatch.setattr(BlockModel, "fingerprint", SMOLLM2)
    monkeypatch.setattr(Correction, "check_shapes", lambda *_: None)
    recipe = resolve_recipe("auto", stock, open_store("memory:"))
    assert recipe.source == "shipped smollm2-135m-instruct"
    assert recipe.adapter is not None
    assert (recipe.sink, len(recipe.adapter.layers)) == ("head:4", 30)
    assert SMOLLM2 in recipe.fingerprints


# -- choice of the recipe ----------------------------------------------------------------------


def test_recipe_is_read_once(model: BlockModel, tmp_path: Path) -> None:
    """The recipe is read when the engine is created."""
    recipe_of(model).save(tmp_path / "recipe")
    engine = BlockAttentionEngine(model, recipe=tmp_path / "recipe")
    prompt = ["Halden is tall.", "It was built in 1931.", "How tall?"]
    expected = engine.answer_logits(prompt, [0])
    recipe_of(model, size=0.3).save(tmp_path / "recipe")
    fresh = BlockAttentionEngine(model, engine.store, recipe=engine.recipe)
    assert torch.equal(engine.answer_logits(prompt, [0]), expected)
    shutil.rmtree(tmp_path / "recipe")
    for one in (engine, fresh):
        assert torch.equal(one.answer_logits(prompt, [0]), expected)
        assert one.generate(prompt, max_new_tokens=1).stats.recipe == str(recipe_of(model))


def test_a_recipe_is_loaded_once_per_batch(
    model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_of(model).save(tmp_path / "recipe")
    load = Mock(wraps=Recipe.load)
    monkeypatch.setattr(Recipe, "load", load)
    engine, prompts = BlockAttentionEngine(model), [["Halden is tall.", "a", "b"]] * 3
    answers = engine.generate_batch(prompts, recipe=tmp_path / "recipe", max_new_tokens=1)
    assert {one.stats.recipe for one in answers} == {str(recipe_of(model))}
    load.assert_called_once_with(tmp_path / "recipe")


def test_an_explicit_recipe_is_used(model: BlockModel, tmp_path: Path) -> None:
    store, recipe = open_store("memory:"), recipe_of(model, promote=1)
    recipe.save(tmp_path / "recipe")
    assert resolve_recipe(recipe, model, store) is recipe
    assert resolve_recipe(str(tmp_path / "recipe"), model, store) == recipe
    assert resolve_recipe(tmp_path / "recipe", model, store) == recipe
    with pytest.raises(TypeError, match=r"Invalid recipe \{'recompute': 0.1\}: expected"):
        resolve_recipe({"recompute": 0.1}, model, store)  # type: ignore[arg-type]


def test_recipes_of_other_models_are_refused(model: BlockModel, stock: BlockModel) -> None:
    recipe = recipe_of(stock)
    with pytest.raises(ValueError, match=r"belongs to stock .* found tiny .*blockattn-rag repair"):
        resolve_recipe(recipe, model, open_store("memory:"))
    with pytest.raises(ValueError, match="head of a prompt has"):
        resolve_recipe("head:9999", model, open_store("memory:"))


def test_adapters_of_other_shapes_are_refused(model: BlockModel) -> None:
    """A fingerprint can be edited, so shapes are also compared."""
    layers = correction_of(model).layers
    short = [one._replace(weight=one.weight[:1], bias=one.bias[:1]) for one in layers]
    for wrong, expected in (
        (layers[:-1], "has 2 layers, expected 3"),
        ((*layers, layers[0]), "has 4 layers, expected 3"),
        (short, r"shape \(1, 8, 16\) in layer 0, expected \(2, 8, 16\)"),
    ):
        adapter = Correction(tuple(wrong), "none", model.fingerprint)
        recipe = Recipe(adapter=adapter, fingerprints=(model.fingerprint,))
        with pytest.raises(ValueError, match=expected):
            resolve_recipe(recipe, model, open_store("memory:"))


def test_auto_uses_the_recipe_of_the_database_or_store(model: BlockModel, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "db" / "kv")
    places = (tmp_path / "db", tmp_path / "db" / "kv", tmp_path / "elsewhere")
    for promote, place in enumerate(places, 1):  # in ascending order of precedence
        recipe_of(model, promote=promote).save(place / "recipe")
        folder = tmp_path / "elsewhere" if promote == 3 else None
        assert resolve_recipe("auto", model, store, folder).promote == promote
    assert DirectoryStore(tmp_path / "db" / "kv").keys() is not None  # the folder remains a store
    assert resolve_recipe(None, model, store).promote == 2


def test_auto_uses_the_recipe_in_the_models_folder(stock: BlockModel, tmp_path: Path) -> None:
    recipe_of(stock).save(tmp_path / "model" / "recipe")
    named = BlockModel(stock.hf_model, stock.tokenizer, name=str(tmp_path / "model"))
    assert resolve_recipe("auto", named, open_store("memory:")) == recipe_of(stock)


def test_auto_skips_recipes_of_other_models(
    model: BlockModel, stock: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe_of(model).save(tmp_path / "recipe")
    assert resolve_recipe("auto", stock, open_store("memory:"), tmp_path) == Recipe.of_text(STOCK)
    assert f"Skipped the recipe in {tmp_path / 'recipe'}. The recipe" in caplog.text


def test_auto_refuses_a_damaged_recipe(model: BlockModel, tmp_path: Path) -> None:
    recipe_of(model).save(tmp_path / "recipe")
    next((tmp_path / "recipe").glob("adapter-*")).unlink()
    with pytest.raises(ValueError, match="is damaged"):
        resolve_recipe("auto", model, open_store("memory:"), tmp_path)


def test_the_stock_model_warning_names_cost_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    plain = BlockModel(tiny_model("qwen2"), tiny_tokenizer(), name="plain")
    for _ in range(2):  # logs once
        assert resolve_recipe("auto", plain, open_store("memory:")) == Recipe.of_text(STOCK)
    [line] = caplog.messages
    assert "uses 'head+recompute:0.1', which recomputes 10 % of the passages' tokens" in line
    assert "keeps most" not in line  # would not be true of every model
    for remedy in ("'fast'", "`blockattn-rag eval`", "`blockattn-rag repair --model plain"):
        assert remedy in line


def test_auto_omits_settings_that_the_model_cannot_run(caplog: pytest.LogCaptureFixture) -> None:
    latent = new_model("latent")
    assert resolve_recipe("auto", latent, open_store("memory:")) == Recipe("head:4")
    assert "uses 'head:4', which costs nothing per answer" in caplog.text
    with pytest.raises(UnsupportedModelError, match="cannot recompute"):
        resolve_recipe("recompute:0.1", latent, open_store("memory:"))


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("none", Recipe()),
        ("fast", Recipe("head:4")),
        ("bos", Recipe("bos")),
        ("head", Recipe("head")),
        ("head:4", Recipe("head:4")),
        ("recompute:0.05", Recipe(recompute=0.05)),
        ("head:4+recompute:0.1", Recipe("head:4", recompute=0.1)),
        ("head:2+promote:1+recompute:1", Recipe("head:2", promote=1, recompute=1)),
    ],
)
def test_settings_have_a_text_form(stock: BlockModel, text: str, recipe: Recipe) -> None:
    assert resolve_recipe(text, stock, open_store("memory:")) == recipe
    assert Recipe.of_text(str(recipe)) == recipe
    assert known_digests(text, None, "") == [recipe.digest]


@pytest.mark.parametrize(
    "text", ["", "fast+promote:1", "heads+bos", "head+", "recompute:", "promote:0.5", "recompute:x"]
)
def test_any_other_text_is_interpreted_as_a_folder(stock: BlockModel, text: str) -> None:
    with pytest.raises(ValueError, match=r"Found no recipe at .*'head\+recompute:0.1'"):
        resolve_recipe(text, stock, open_store("memory:"))


def test_settings_out_of_range_are_refused(stock: BlockModel) -> None:
    with pytest.raises(ValueError, match="share of the tokens, from 0 to 1"):
        resolve_recipe("head:4+recompute:10", stock, open_store("memory:"))
    with pytest.raises(ValueError, match="Invalid settings 'my-recipe'"):
        resolve_recipe("auto", stock, open_store("memory:"), stock="my-recipe")


def test_the_warning_of_a_database_names_its_repair_command(
    stock: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = BlockModel(copy.deepcopy(stock.hf_model), tiny_tokenizer(), name="other")
    BlockAttentionEngine(other, folder=tmp_path)
    [record] = caplog.records
    assert f"`blockattn-rag repair --db {tmp_path}`" in record.getMessage()


def test_block_tuned_models_run_as_they_were_trained(
    stock: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuned = BlockModel(copy.deepcopy(stock.hf_model), tiny_tokenizer(), name="tuned")
    tuned.config.block_attention = {"positions": "composite", "sink": "bos"}
    recipe_of(tuned).save(tmp_path / "recipe")
    expected = Recipe("bos", positions="composite")
    assert resolve_recipe("auto", tuned, open_store("memory:"), tmp_path) == expected
    assert not caplog.records
    resolve_recipe("none", tuned, open_store("memory:"))
    assert "was trained with positions='composite' and sink='bos'" in caplog.text


# -- where "auto" looks --------------------------------------------------------------------------


def test_the_name_of_a_model_is_not_looked_up_in_the_current_directory(
    stock: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("stock", "smollm2", "bundled"):
        recipe_of(stock, promote=1).save(tmp_path / name / "recipe")
        named = BlockModel(stock.hf_model, stock.tokenizer, name=name)
        assert resolve_recipe("auto", named, open_store("memory:")) == Recipe.of_text(STOCK)
    assert known_digests("auto", None, "smollm2") == known_digests(STOCK, None, "")


def test_a_model_loaded_from_the_current_directory_uses_its_recipe(
    stock: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stock.hf_model.save_pretrained("mine")
    stock.tokenizer.tokenizer.save_pretrained("mine")
    loaded = BlockModel.from_pretrained("mine", device="cpu")
    recipe_of(loaded).save("mine/recipe")
    assert resolve_recipe("auto", loaded, open_store("memory:")) == recipe_of(loaded)


def test_recipes_outside_of_the_database_cause_a_warning(
    stock: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DirectoryStore(tmp_path / "shared" / "kv")
    recipe_of(stock).save(tmp_path / "shared" / "recipe")
    for _ in range(2):
        assert resolve_recipe("auto", stock, store) == recipe_of(stock)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    place = tmp_path / "shared" / "recipe"
    assert f"uses the recipe that was found in {place}: head:4+adapter:" in record.getMessage()
    caplog.clear()
    resolve_recipe("auto", stock, store, tmp_path / "shared")  # the recipe of the database
    resolve_recipe(tmp_path / "shared" / "recipe", stock, store)
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"name": "pancakes"}', "has version None, expected 3"),
        ('{"version": 99}', "has version 99, expected 3"),
        ('{"ver', "found no valid JSON"),
        (None, "head of a prompt has"),
    ],
)
def test_unusable_recipes_outside_of_the_database_are_skipped(
    stock: BlockModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: str | None,
    message: str,
) -> None:
    store = DirectoryStore(tmp_path / "kv")
    place = tmp_path / "recipe"
    Recipe("head:9999").save(place)  # has more tokens than the head of a prompt
    if content is not None:
        (place / "recipe.json").write_text(content)
        assert known_digests("auto", store.path, "stock") == known_digests(STOCK, None, "")
    assert resolve_recipe("auto", stock, store) == Recipe.of_text(STOCK)
    assert f"Skipped the recipe in {place}. " in caplog.text
    assert message in caplog.text
    with pytest.raises(ValueError, match=message):
        resolve_recipe(place, stock, store)
    with pytest.raises(ValueError, match=message):
        resolve_recipe("auto", stock, store, tmp_path)  # the recipe of the database


@pytest.mark.parametrize("unreadable", ["folder", "file"])
def test_an_unreadable_recipe_of_the_database_is_an_error(
    stock: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    Recipe("bos").save(tmp_path / "recipe")

    def denied(call: Callable[..., Any]) -> Callable[..., Any]:
        def access(path: Any, *args: Any, **options: Any) -> Any:
            if str(path).endswith("recipe.json"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *args, **options)

        return access

    if unreadable == "folder":
        monkeypatch.setattr(os, "stat", denied(os.stat))
    monkeypatch.setattr(Path, "open", denied(Path.open))
    message = r"Cannot read the recipe .*recipe\.json: .*readable"
    store = open_store("memory:")
    with pytest.raises(PermissionError, match=message):
        resolve_recipe("auto", stock, store, tmp_path)
    # A recipe next to a store outside of the database may belong to someone else.
    other = DirectoryStore(tmp_path / "kv")
    assert resolve_recipe("auto", stock, other).source == "stock model"
