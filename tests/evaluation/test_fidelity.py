"""Fidelity: figures against the oracle by hand, modes, files, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockattn_rag.check.oracle import oracle_logits
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import ContextOverflowError, DataError
from blockattn_rag.evaluation import EvaluationSample, fidelity, measure_fidelity, read_samples
from blockattn_rag.evaluation.fidelity import FLOOR, FidelityReport, full_answer
from blockattn_rag.evaluation.run import make_prompt
from blockattn_rag.model.reader import Reader
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.prompts.sinks import sink_ids
from tests.engines import tuned_engine
from tests.evaluation.samples import record, write_jsonl

NEW = 4


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return tuned_engine()


@pytest.fixture
def samples(tmp_path: Path) -> list[EvaluationSample]:
    return read_samples(write_jsonl(tmp_path / "d.jsonl", map(record, range(1, 4))))


def measure(
    engine: BlockAttentionEngine, samples: list[EvaluationSample], *modes: str, **options: object
) -> FidelityReport:
    return measure_fidelity(engine, samples, modes, max_new_tokens=NEW, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("sink", ["none", "head:4"])
def test_divergence_and_agreement_are_those_of_the_oracle(
    engine: BlockAttentionEngine, samples: list[EvaluationSample], sink: str
) -> None:
    model = engine.model
    report = measure(engine, samples, f"sink={sink}")
    for sample, found in zip(samples, report.records[len(samples) :], strict=True):
        prompt = make_prompt(engine, CHAT, sample, "full")
        ids = model.tokenizer.prompt_ids(prompt)
        answer = engine.generate(prompt, mode="full", max_new_tokens=NEW).token_ids
        final = [*ids.final, *answer[:-1]]
        full, block = (
            torch.log_softmax(oracle_logits(model.hf_model, blocks, before)[-len(answer) :], -1)
            for blocks, before in (
                ([[*ids.flat, *answer[:-1]]], ()),
                ([*ids.context, final], sink_ids(sink, model.tokenizer)),
            )
        )
        kl = (full.exp() * (full - block)).sum(-1)
        # The oracle's logits are exact to 1e-4 (the design's law), and KL moves by twice as much.
        assert found.kl == pytest.approx(float(kl.mean()), rel=1e-3, abs=2e-4)
        assert found.first_kl == pytest.approx(float(kl[0]), rel=1e-3, abs=2e-4)
        same = (block.argmax(-1) == torch.tensor(answer)).float()
        assert found.agreement == float(same.mean())
        assert found.tokens == len(answer)


def test_the_floor_is_rounding_and_block_mode_is_not(
    engine: BlockAttentionEngine, samples: list[EvaluationSample]
) -> None:
    report = measure(engine, samples, "full", "block", "block-composite", "closed-book")
    assert [row.mode for row in report.results] == [
        FLOOR,
        "block",
        "block-composite",
        "closed-book",
    ]
    assert report[FLOOR].kl.high < 1e-8
    assert (report[FLOOR].agreement.mean, report[FLOOR].identical.mean) == (1, 1)
    assert report["block"].kl.low > 1e-3
    assert report["closed-book"].kl.mean > report["block"].kl.mean
    assert report["closed-book"].agreement.mean < report["block"].agreement.mean
    assert report["closed-book"].identical.mean < 1
    assert report["block"].recovery is report["closed-book"].recovery is None
    difference = report["block"].kl.mean - report["block-composite"].kl.mean
    recovered = report["block-composite"].recovery
    assert recovered is not None
    assert recovered.mean == pytest.approx(difference / report["block"].kl.mean, rel=1e-4)
    row = report.to_dict()["rows"][2]
    assert set(row["recovery"]) == set(row["kl"]) == {"mean", "low", "high"}


def test_where_block_mode_equals_full_mode_nothing_is_recovered(
    engine: BlockAttentionEngine, samples: list[EvaluationSample]
) -> None:
    bare = [replace(sample, passages=()) for sample in samples]
    report = measure(engine, bare, "block", "sink=first-block", "sink=head:4")
    assert [row.recovery for row in report.results] == [None] * 4
    assert report["sink=head:4"].kl.high < 1e-8


def test_modes_are_the_same_whatever_the_engines_own_sink(
    engine: BlockAttentionEngine, samples: list[EvaluationSample]
) -> None:
    sunk = BlockAttentionEngine(engine.model, sink="head:4")
    modes = ("block", "sink=head:4")
    assert measure(sunk, samples, *modes).records == measure(engine, samples, *modes).records


def test_int8_blocks_are_compared_beside_those_of_the_model(
    engine: BlockAttentionEngine, samples: list[EvaluationSample]
) -> None:
    modes = ("block", "kv_dtype=int8", "kv_dtype=int8+sink=head:4", "sink=head:4")
    report = measure(engine, samples, *modes)
    kl = {mode: report[mode].kl.mean for mode in modes}
    for int8, plain in (modes[1], modes[0]), (modes[2], modes[3]):
        assert 0 < abs(kl[int8] - kl[plain]) < 0.1 * kl[plain]
    half = BlockAttentionEngine(engine.model, kv_dtype="int8")
    other = measure(half, samples, "block", "kv_dtype=model")
    assert other["block"].kl.mean == kl["kv_dtype=int8"]
    assert other["kv_dtype=model"].kl.mean == kl["block"]
    assert other.settings["kv_dtype"] == "int8"


def test_without_block_mode_nothing_is_recovered(
    engine: BlockAttentionEngine, samples: list[EvaluationSample]
) -> None:
    assert measure(engine, samples, "sink=bos")["sink=bos"].recovery is None


def test_a_stopped_run_goes_on_where_it_was(
    engine: BlockAttentionEngine,
    samples: list[EvaluationSample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = measure(engine, samples, "block")
    path = tmp_path / "records.jsonl"

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(engine, samples, "block", records_path=path, on_progress=stop)
    asked: list[str] = []

    def noted(of: BlockAttentionEngine, prompt: BlockPrompt, limit: int) -> Any:
        asked.append(prompt.final)
        return full_answer(of, prompt, limit)

    monkeypatch.setattr(fidelity, "full_answer", noted)
    resumed = measure(engine, samples, "block", records_path=path)
    assert len(asked) == 1
    assert resumed.records == expected.records
    more = measure(engine, samples, "block", "sink=bos", records_path=path)
    assert len(asked) == 4  # the new mode alone is compared, with full mode's answer as before
    assert more.records[: len(resumed.records)] == resumed.records
    with pytest.raises(DataError, match="other settings"):
        measure(engine, samples, "block", records_path=path, num_passages=1)
    changed = [EvaluationSample("q1", "Another question?", (), samples[0].passages)]
    with pytest.raises(DataError, match="other questions"):
        measure(engine, changed, "block", records_path=path)


def test_records_made_with_another_file_of_the_same_name_are_refused(
    engine: BlockAttentionEngine, samples: list[EvaluationSample], tmp_path: Path
) -> None:
    model, path, folder = engine.model, tmp_path / "records.jsonl", tmp_path / "reader"
    mode = f"reader={folder}"
    for seed in (0, 1):
        if seed:
            measure(engine, samples, "block", mode, records_path=path)
            measure(engine, samples, mode, records_path=path)
        reader = Reader.new(model.hf_model, rank=2, seed=seed)
        reader.save(folder, {"fingerprint": model.fingerprint})
    with pytest.raises(DataError, match="has changed since"):
        measure(engine, samples, mode, records_path=path)
    measure(engine, samples, "block", records_path=path)  # which names no file


def test_what_cannot_be_measured_is_refused(
    engine: BlockAttentionEngine, samples: list[EvaluationSample]
) -> None:
    for modes in ((), ("full",), ("block", "block")):
        with pytest.raises(ValueError, match="modes must be distinct"):
            measure(engine, samples, *modes)
    for mode in ("blocks", "sink", "sink=tail", "floor"):
        with pytest.raises(ValueError, match=r"modes are .*; found|sink must be .*; found"):
            measure(engine, samples, mode)
    with pytest.raises(ValueError, match=r"kv_dtype must be one of .* found 'int4'"):
        measure(engine, samples, "kv_dtype=int4")
    with pytest.raises(ValueError, match="at least one sample"):
        measure(engine, [], "block")


def test_an_answer_that_does_not_fit_is_refused(engine: BlockAttentionEngine) -> None:
    room = engine.model.max_context_tokens
    with pytest.raises(ContextOverflowError, match="there is room for 2 of 3 answer tokens"):
        engine.answer_logits(["a", "b" * (room - 4)], [1, 2, 3])
    with pytest.raises(ValueError, match="no token to predict"):
        engine.answer_logits(["a", "b"], [])
