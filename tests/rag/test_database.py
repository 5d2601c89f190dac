"""The database behind the command line: what is found is the same every time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from blockattn_rag.demo.corpus import bundled_corpus, bundled_questions
from blockattn_rag.engine.calibration import PLAIN_SETTINGS, Calibration, write_calibration
from blockattn_rag.errors import DatabaseError
from blockattn_rag.rag.database import MANIFEST, Database, Manifest
from tests.engine.test_calibration import calibration


def test_the_nearest_passages_are_found_whatever_graph_chroma_drew(
    model: Path, tmp_path: Path
) -> None:
    for number in range(4):  # the graph has a random part
        database = Database.create(tmp_path / f"{number}", Manifest(str(model), fingerprint=""))
        texts = [f"title: {p.title}\n\n{p.text}" for p in bundled_corpus()]
        vectors = np.array(database.embedding.get_text_embedding_batch(texts))
        database.collection.add([str(i) for i in range(len(vectors))], embeddings=vectors)
        questions = [turn.question for turn in bundled_questions()]
        wanted = np.array(database.embedding.get_text_embedding_batch(questions))
        found = database.collection.query(wanted, n_results=5)["ids"]
        exact = np.argsort(-wanted @ vectors.T, axis=1, kind="stable")[:, :5]
        assert [{int(i) for i in ids} for ids in found] == [set(row) for row in exact.tolist()]


def test_a_database_keeps_its_namespace(model: Path, tmp_path: Path) -> None:
    wanted = Manifest(str(model), fingerprint="", namespace="one", sink="head:2")
    Database.create(tmp_path / "db", wanted)
    engine = Database.open(tmp_path / "db").local_engine
    assert (engine.access.namespace, engine.defaults.sink) == ("one", "head:2")
    manifest = tmp_path / "db" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"one"', '"o/ne"'))
    with pytest.raises(DatabaseError, match="a namespace is named by"):
        Database.open(tmp_path / "db")


def test_a_new_database_has_the_sink_that_its_model_was_fine_tuned_with(
    model: Path, tmp_path: Path
) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(model, tuned)
    config = json.loads((tuned / "config.json").read_text())
    config["block_attention"] = {"version": 1, "sink": "head:3"}
    (tuned / "config.json").write_text(json.dumps(config))
    for number, (wanted, sink) in enumerate([("", "head:3"), ("none", "none")]):
        folder = tmp_path / f"{number}"
        created = Database.create(folder, Manifest(str(tuned), fingerprint="", sink=wanted))
        assert created.manifest.sink == created.local_engine.defaults.sink == sink
        assert Database.open(folder).local_engine.defaults.sink == sink


def test_a_database_keeps_what_its_blocks_are_kept_in(model: Path, tmp_path: Path) -> None:
    wanted = Manifest(str(model), fingerprint="", kv_dtype="int8", sink="head:2")
    assert Database.create(tmp_path / "db", wanted).local_engine.kv_dtype == "int8"
    assert Database.open(tmp_path / "db").local_engine.kv_dtype == "int8"
    manifest = tmp_path / "db" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"int8"', '"int4"'))
    with pytest.raises(DatabaseError, match=r"is damaged .*int4"):
        Database.open(tmp_path / "db")


def test_a_database_keeps_the_address_of_its_store(model: Path, tmp_path: Path) -> None:
    wanted = Manifest(str(model), fingerprint="", store=f"file://{tmp_path}/elsewhere")
    Database.create(tmp_path / "db", wanted)
    store = Database.open(tmp_path / "db").local_engine.store
    assert repr(store) == f"DirectoryStore({str(tmp_path / 'elsewhere')!r})"
    assert not (tmp_path / "db" / "kv").exists()


def test_databases_that_share_a_store_have_calibrations_of_their_own(
    model: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    wanted = Manifest(str(model), fingerprint="", store=str(store))
    first, second, third = (
        Database.create(tmp_path / name, wanted) for name in ("first", "second", "third")
    )

    def calibrated(path: Path, seed: int) -> Calibration:
        settings = {**PLAIN_SETTINGS, "merge": "scale:0.9"}
        made = calibration(first.manifest.fingerprint, settings=settings, seed=seed)
        write_calibration(path, made)
        return made

    def found(database: Database) -> tuple[Calibration | None, str | None]:
        engine = Database.open(database.path).local_engine
        return engine.calibration, engine.defaults.merge

    made = [calibrated(one.calibration_path, seed) for seed, one in enumerate((first, second))]
    assert [found(one) for one in (first, second)] == [(one, "scale:0.9") for one in made]
    assert found(third)[0] is None
    # As calibrations of a database were kept before: beside its store.
    beside = calibrated(store / "calibration.json", 2)
    assert [found(one)[0] for one in (first, second, third)] == [*made, beside]
    # A later ingestion goes by the database's own, too.
    assert Database.create(second.path, wanted).local_engine.calibration == made[1]
