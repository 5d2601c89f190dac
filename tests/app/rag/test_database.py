from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from blockattn_rag.app.demo.corpus import bundled_corpus, bundled_questions
from blockattn_rag.app.rag.database import MANIFEST, Database, Manifest
from blockattn_rag.engine.outline import STOCK
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import DatabaseError


def test_finds_nearest_passages_in_any_graph(model: Path, tmp_path: Path) -> None:
    for number in range(4):  # construction of the graph is partly random
        database = Database.create(tmp_path / f"{number}", Manifest(str(model)))
        texts = [f"title: {p.title}\n\n{p.text}" for p in bundled_corpus()]
        vectors = np.array(database.embedding.get_text_embedding_batch(texts))
        database.collection.add([str(i) for i in range(len(vectors))], embeddings=vectors)
        questions = [turn.question for turn in bundled_questions()]
        wanted = np.array(database.embedding.get_text_embedding_batch(questions))
        found = database.collection.query(wanted, n_results=5)["ids"]
        exact = np.argsort(-wanted @ vectors.T, axis=1, kind="stable")[:, :5]
        assert [{int(i) for i in ids} for ids in found] == [set(row) for row in exact.tolist()]


def test_settings_survive_reopening_the_database(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    settings = Manifest(
        str(model), namespace="one", recipe="head:2", dtype="bfloat16", kv_dtype="int8",
        store=f"file://{tmp_path}/elsewhere",
    )  # fmt: skip
    for database in (Database.create(folder, settings), Database.open(folder)):
        engine = database.engine
        assert (engine.access.namespace, engine.recipe.sink) == ("one", "head:2")
        assert (engine.kv_dtype, str(engine.model.dtype)) == ("int8", "torch.bfloat16")
        assert repr(engine.store) == f"DirectoryStore({str(tmp_path / 'elsewhere')!r})"
    assert not (folder / "kv").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"namespace": "o/ne"}, "A namespace consists of"),
        ({"kv_dtype": "int4"}, "is damaged .*int4"),
        ({"recipe": 5}, r"damaged \(Found recipe 5, expected a string\)"),
        ({"stock": "my-recipe"}, r"damaged \(Found stock 'my-recipe', expected settings"),
        ({"other": 5}, "is damaged"),
        ({"version": 9}, "has version 9, expected 2"),
        (None, "is damaged"),
    ],
)
def test_an_invalid_manifest_is_reported(
    tmp_path: Path, changed: dict[str, object] | None, message: str
) -> None:
    content = json.dumps(asdict(Manifest("model")) | changed) if changed else "{"
    (tmp_path / MANIFEST).write_text(content, encoding="utf-8")
    with pytest.raises(DatabaseError, match=message):
        Manifest.read(tmp_path)


def test_a_database_runs_with_the_settings_of_its_ingestion(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    created = Database.create(tmp_path, Manifest(str(model)))
    assert str(created.engine.recipe) == created.manifest.stock == STOCK
    caplog.clear()
    assert str(Database.open(tmp_path).engine.recipe) == STOCK
    assert "continues to use it" not in caplog.text
    path = tmp_path / MANIFEST
    fields = json.loads(path.read_text())
    del fields["stock"]  # which earlier versions did not write
    path.write_text(json.dumps(fields))
    found = Database.open(tmp_path)
    assert (str(found.engine.recipe), found.manifest.stock) == ("head:4", "head:4")
    assert f"the recipe head:4, and continues to use it; new databases use {STOCK}" in caplog.text
    caplog.clear()
    assert str(Database.open(tmp_path, recipe="none").engine.recipe) == "none"
    assert "continues to use it" not in caplog.text


def test_fine_tuned_model_runs_as_trained(model: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(model, tuned)
    config = json.loads((tuned / "config.json").read_text())
    config["block_attention"] = {"version": 1, "sink": "head:3"}
    (tuned / "config.json").write_text(json.dumps(config))
    for recipe, sink in (("auto", "head:3"), ("none", "none")):
        folder = tmp_path / recipe
        created = Database.create(folder, Manifest(str(tuned), recipe=recipe))
        assert created.manifest.recipe == recipe
        assert created.engine.recipe.sink == sink
        assert Database.open(folder).engine.recipe.sink == sink


def test_databases_that_share_a_store_have_their_own_recipes(model: Path, tmp_path: Path) -> None:
    wanted = Manifest(str(model), store=str(tmp_path / "store"))
    first, second, third = (
        Database.create(tmp_path / name, wanted) for name in ("first", "second", "third")
    )
    for database, sink in ((first, "head:2"), (second, "head:3")):
        Recipe(sink).save(database.path / "recipe")
    databases = (first, second, third)
    found = [Database.open(one.path).engine.recipe.sink for one in databases]
    assert found == ["head:2", "head:3", "head"]
    # A later ingestion also uses the recipe of the database.
    assert Database.create(second.path, wanted).engine.recipe.sink == "head:3"
    assert Database.open(second.path, recipe="none").engine.recipe == Recipe()


def test_database_adopts_its_new_recipe(model: Path, tmp_path: Path) -> None:
    wanted = Manifest(str(model), recipe="none")
    database = Database.create(tmp_path / "db", wanted)
    Recipe("head:2").save(tmp_path / "db" / "recipe")
    assert Database.open(tmp_path / "db").engine.recipe.sink == "none"
    database.use_own_recipe()
    assert Database.open(tmp_path / "db").engine.recipe.sink == "head:2"
