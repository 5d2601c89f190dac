"""Modes: what their names say, and calibrations as modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.engine.calibration import (
    PLAIN_SETTINGS,
    Calibration,
    prompt_digest,
    write_calibration,
)
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import DataError, StoreError
from blockattn_rag.evaluation import EvaluationSample, evaluate, measure_fidelity, read_samples
from blockattn_rag.evaluation.modes import MODES, engine_for, files_of_modes, mode_options
from blockattn_rag.prompts.formats import CHAT, Passage
from tests.engine.test_calibration import calibration
from tests.evaluation.samples import record, write_jsonl
from tests.model.test_correction import correction_of, saved
from tests.models import shared_tiny_llama, tiny_tokenizer

NEW = 3


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return BlockAttentionEngine.from_pretrained(shared_tiny_llama(), tokenizer=tiny_tokenizer())


@pytest.fixture
def samples(tmp_path: Path) -> list[EvaluationSample]:
    return read_samples(write_jsonl(tmp_path / "d.jsonl", [record(1), record(2)]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calibration.json"


def calibrated(engine: BlockAttentionEngine, **settings: str) -> Calibration:
    """A calibration of the engine's model for prompts of the chat format."""
    prompt = CHAT.prompt("?", [Passage("", "A lake is deep.")], engine.model.tokenizer.tokenizer)
    return calibration(
        engine.model.fingerprint,
        settings={**PLAIN_SETTINGS, **settings},
        prompt_digest=prompt_digest(prompt),
    )


def test_a_calibration_is_block_mode_with_its_settings_and_those_named_beside_it(
    engine: BlockAttentionEngine, path: Path
) -> None:
    correction = saved(correction_of(engine.model, sink="head:3"), path.parent)
    digest = engine.model.load_correction(correction, "head:3").digest
    made = calibrated(engine, sink="head:3", correction=correction)
    write_calibration(path, replace(made, digests={"correction": digest}))
    mode = f"calibrated={path}"
    expected = {**MODES["block"], "sink": "head:3", "correction": correction}
    assert mode_options(mode, engine) == expected
    assert mode_options(f"{mode}+promote=1", engine) == {**expected, "promote": "1"}
    # A correction belongs to its sink.
    assert mode_options(f"{mode}+sink=none", engine) == MODES["block"]
    assert mode_options(f"{mode}+kv_dtype=int8", engine) == expected
    assert engine_for(engine, f"{mode}+kv_dtype=int8").kv_dtype == "int8"
    with pytest.raises(ValueError, match="name its options"):
        mode_options(mode)
    for name in ("calibrated", f"{mode}+{mode}"):
        with pytest.raises(ValueError, match="calibrated=FILE"):
            mode_options(name, engine)
    saved(correction_of(engine.model, sink="head:3", size=0.2), path.parent)
    with pytest.raises(StoreError, match="has changed since; calibrate anew"):
        mode_options(mode, engine)


def test_a_calibration_is_measured_as_its_settings_are(
    engine: BlockAttentionEngine, samples: list[EvaluationSample], path: Path
) -> None:
    write_calibration(path, calibrated(engine, sink="head:3", merge="scale:0.9"))
    modes = (f"calibrated={path}", "sink=head:3+merge=scale:0.9")
    rows = measure_fidelity(engine, samples, ("block", *modes), max_new_tokens=NEW)
    assert rows[modes[0]].kl == rows[modes[1]].kl != rows["block"].kl
    answers = evaluate(engine, samples, modes, max_new_tokens=NEW).records
    assert [one.output for one in answers[:2]] == [one.output for one in answers[2:]]


Measure = Callable[..., Any]


@pytest.mark.parametrize("measure", [evaluate, measure_fidelity])
def test_a_calibration_that_is_missing_or_of_something_else_is_refused_before_anything_is_asked(
    engine: BlockAttentionEngine,
    samples: list[EvaluationSample],
    path: Path,
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_answer(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was asked")

    monkeypatch.setattr(engine, "generate_batch", no_answer)
    monkeypatch.setattr("blockattn_rag.evaluation.fidelity.full_answer", no_answer)
    run = partial(measure, engine, samples, (f"calibrated={path}",))
    with pytest.raises(ValueError, match="found no file of calibrations at"):
        run()
    write_calibration(path, calibration("f" * 64))
    with pytest.raises(ValueError, match=r"some/model in float32 \(key f+\), expected one of"):
        run()
    write_calibration(path, calibrated(engine, sink="head:3"))
    with pytest.raises(ValueError, match=r"with another head or block .* mode sink=head:3"):
        run(prompt="block-attention")
    path.write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        run()


def test_of_several_tenants_calibrations_the_engines_own_counts_and_else_the_only_one(
    engine: BlockAttentionEngine, path: Path
) -> None:
    def sink(namespace: str) -> str:
        one = BlockAttentionEngine(engine.model, namespace=namespace)
        found: str = mode_options(f"calibrated={path}", one)["sink"]
        return found

    write_calibration(path, replace(calibrated(engine, sink="head:2"), namespace="first"))
    assert [sink(name) for name in ("first", "second", "")] == ["head:2"] * 3
    write_calibration(path, replace(calibrated(engine, sink="head:3"), namespace="second"))
    assert [sink(name) for name in ("first", "second")] == ["head:2", "head:3"]
    with pytest.raises(ValueError, match="of the namespaces 'first', 'second', expected one"):
        sink("")


def test_records_of_a_calibration_with_other_settings_are_refused(
    engine: BlockAttentionEngine, samples: list[EvaluationSample], path: Path
) -> None:
    records, mode = path.parent / "records.jsonl", f"calibrated={path}"
    run = partial(measure_fidelity, engine, samples, max_new_tokens=NEW, records_path=records)
    write_calibration(path, calibrated(engine, sink="head:3"))
    found = run(("block", mode)).records
    write_calibration(path, calibration("f" * 64))  # another model's, which changes nothing
    assert run(("block", mode)).records == found
    write_calibration(path, calibrated(engine, sink="head:2"))
    with pytest.raises(DataError, match=r"a file that the mode 'calibrated=.*' names has changed"):
        run(("block", mode))
    assert files_of_modes(["block", "sink=head:2"], engine) == {"block": "", "sink=head:2": ""}


@pytest.mark.parametrize("measure", [evaluate, measure_fidelity])
def test_a_calibration_that_is_replaced_while_it_is_measured_is_told_of(
    engine: BlockAttentionEngine, samples: list[EvaluationSample], path: Path, measure: Measure
) -> None:
    def replacing(*_: object) -> None:
        write_calibration(path, calibrated(engine, sink="head:2"))

    write_calibration(path, calibrated(engine, sink="head:3"))
    modes = ("block", f"calibrated={path}")
    with pytest.raises(DataError, match=r"'calibrated=.*' names were replaced while"):
        measure(engine, samples, modes, max_new_tokens=NEW, on_progress=replacing)
