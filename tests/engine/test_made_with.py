"""Fits are used with what they were made with, or users are told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.engine import made_with as module
from blockattn_rag.engine.calibration import PLAIN_SETTINGS, settings_digests
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.made_with import foreign, made_with
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.model import BlockModel
from blockattn_rag.model.reader import Reader
from blockattn_rag.store import DirectoryStore
from tests.engine.test_calibration import calibrated, certificate, merge_of, prompt
from tests.model.test_correction import correction_of, saved
from tests.models import tiny_model, tiny_tokenizer


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> BlockModel:
    monkeypatch.setattr(module, "_told", set())
    model = BlockModel(tiny_model(), tiny_tokenizer(), name="some/model")
    model.config.block_attention = {"tuned": True}  # of which there is no other warning
    return model


def reader_of(model: BlockModel, folder: Path, **told: Any) -> str:
    Reader.new(model.hf_model, rank=1).save(folder, {"fingerprint": model.fingerprint, **told})
    return str(folder)


def said(caplog: pytest.LogCaptureFixture, engine: BlockAttentionEngine, **options: Any) -> str:
    """The warnings of two questions."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        for _ in range(2):
            engine.generate(prompt(2), max_new_tokens=1, **options)
    return "\n".join(record.getMessage() for record in caplog.records)


def test_a_reader_with_another_sink_correction_or_merge_is_warned_of_once(
    model: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    correction = correction_of(model, sink="head:3")
    file = saved(correction, tmp_path)
    used = {"sink": "head:3", "correction": file, "merge": "scale:0.9"}
    told = made_with(**used)
    assert told == {"sink": "head:3", "correction": correction.digest, "merge": "scale:0.9"}
    reader = reader_of(model, tmp_path / "reader", **told)
    engine = BlockAttentionEngine(model, reader=reader)
    assert said(caplog, engine, **used) == ""
    assert said(caplog, engine, mode="full") == ""
    digest = f"the correction {correction.digest[:12]}..."
    (warning,) = said(caplog, engine, **{**used, "correction": "none"}).splitlines()
    assert warning.startswith(
        f"The reader in {reader} was made with {digest}, and is used with correction=none. "
    )
    assert "use it with what it was made with" in warning
    assert "`blockattn-rag adapt`" in warning
    (warning,) = said(caplog, engine).splitlines()
    assert f"made with sink=head:3 and {digest} and merge=scale:0.9, and is used with " in warning
    assert "used with sink=none and correction=none and merge=none." in warning
    assert said(caplog, engine) == ""


def test_a_changed_correction_is_another_one(
    model: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = saved(correction_of(model, sink="head:3"), tmp_path)
    reader = reader_of(model, tmp_path / "reader", **made_with("head:3", file, "none"))
    other = correction_of(model, sink="head:3", size=0.2)
    saved(other, tmp_path)
    engine = BlockAttentionEngine(model, sink="head:3", correction=file, reader=reader)
    assert f"used with the correction {other.digest[:12]}..." in said(caplog, engine)


def test_a_merge_with_another_sink_is_warned_of(
    model: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"sink": "head:3", "correction": "none"}
    merge = merge_of(model, tmp_path / "m.safetensors", told)
    engine = BlockAttentionEngine(model, merge=merge)
    assert said(caplog, engine, sink="head:3") == ""
    expected = f"The merge in {merge} was made with sink=head:3, and is used with sink=none."
    assert said(caplog, engine).startswith(expected)


def test_fits_that_do_not_tell_are_not_warned_of(model: BlockModel, tmp_path: Path) -> None:
    reader = reader_of(model, tmp_path / "reader", merge=None)
    merge = merge_of(model, tmp_path / "m.safetensors")
    given = GenerateOptions(sink="bos", merge=merge, reader=reader)
    assert foreign(model, given) == ""
    (tmp_path / "reader" / "reader.json").unlink()  # as PEFT alone writes it
    assert foreign(model, given) == ""


@pytest.mark.parametrize("qualified", [True, False])
def test_what_was_calibrated_together_is_not_warned_of(
    model: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, qualified: bool
) -> None:
    reader = reader_of(model, tmp_path / "reader", sink="bos")
    settings = {**PLAIN_SETTINGS, "reader": reader}
    options = GenerateOptions.parse(settings, GenerateOptions())
    store = DirectoryStore(tmp_path / "kv")
    digests, certificates = settings_digests(model, options), (certificate(qualified=qualified),)
    calibrated(model, store, settings=settings, digests=digests, certificates=certificates)
    engine = BlockAttentionEngine(model, store)
    assert said(caplog, engine) == ""
    assert "made with sink=bos" in said(caplog, engine, sink="head:3")
