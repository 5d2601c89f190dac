"""Files that a calibration is given, and what each was made with."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from blockattn_rag.engine.made_with import made_with
from blockattn_rag.evaluation.calibration.fits import fits_of
from blockattn_rag.evaluation.calibration.settings import Setting
from blockattn_rag.model import BlockModel
from tests.engine.test_calibration import merge_of
from tests.engine.test_made_with import reader_of
from tests.model.test_correction import correction_of, saved
from tests.models import tiny_model, tiny_tokenizer


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> BlockModel:
    monkeypatch.setattr("blockattn_rag.engine.made_with._told", set())
    return BlockModel(tiny_model(), tiny_tokenizer(), name="some/model")


def test_fits_are_tried_with_what_they_were_made_with_where_that_is_given(
    model: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    correction = saved(correction_of(model, sink="head:3"), tmp_path)
    based = {"sink": "head:3", "correction": correction}
    on_correction = made_with(**based, merge="none")
    merge = merge_of(model, tmp_path / "m.safetensors", on_correction)
    on_both = made_with(**based, merge=merge)
    reader = reader_of(model, tmp_path / "reader", **on_both)
    found = fits_of(model, Path(correction), Path(merge), Path(reader))
    assert found.corrected == Setting("head:3", correction)
    assert found.merged == Setting("head:3", correction, merge)
    assert found.read == Setting("head:3", correction, merge, reader=reader)
    assert found.paths == [correction, merge, reader]
    assert found.digests.keys() == {"correction", "merge", "reader"}
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        alone = fits_of(model, None, None, Path(reader))
    assert alone.read == Setting("head:3", reader=reader)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"the correction {on_both['correction'][:12]}... and the merge" in warning


def test_sinks_that_cannot_be_used_here_are_not_tried(model: BlockModel, tmp_path: Path) -> None:
    for number, sink in enumerate(("first-block", "head:9999", "nonsense")):
        reader = reader_of(model, tmp_path / str(number), sink=sink)
        assert fits_of(model, None, None, Path(reader)).read == Setting(reader=reader)
    none = fits_of(model, None, None, None)
    assert (none.read, none.paths, none.digests) == (None, [], {})


def test_a_reader_with_a_merge_of_words_is_tried_with_it(model: BlockModel, tmp_path: Path) -> None:
    reader = reader_of(model, tmp_path / "reader", **made_with("bos", "none", "scale:0.9"))
    found = fits_of(model, None, None, Path(reader)).read
    assert found == Setting("bos", merge="scale:0.9", reader=reader)
