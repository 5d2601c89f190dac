"""Calibrations: the file, what the engine takes of it, and the certificate of each answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.attention.context_merge import LearnedMerge
from blockattn_rag.attention.merge_file import save_merge
from blockattn_rag.engine.calibration import (
    PLAIN_SETTINGS,
    Calibration,
    calibration_path,
    prompt_digest,
    read_calibrations,
    settings_digests,
    write_calibration,
)
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.option_files import merge_digest
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.results import Certificate, ReuseStats
from blockattn_rag.errors import StoreError
from blockattn_rag.model import BlockModel
from blockattn_rag.model.reader import Reader
from blockattn_rag.prompts.blocks import BlockPrompt, BlockTemplate, Span
from blockattn_rag.store import DirectoryStore, MemoryStore, gc, verify
from tests.model.test_correction import correction_of, saved
from tests.models import tiny_model, tiny_tokenizer

SETTINGS = {**PLAIN_SETTINGS, "sink": "head:3", "merge": "scale:0.95"}
TEMPLATE = BlockTemplate(after="\n\n")


def prompt(passages: int, *, head: str = "Answer.\n", template: BlockTemplate = TEMPLATE) -> Any:
    texts = [Span(f"passage {number}", "passage") for number in range(passages)]
    spans = [Span(head, "system")]
    for text in texts:
        spans += [text, Span("\n", "system")]
    return BlockPrompt.from_spans([*spans, Span("Q?", "conversation")], template)


def certificate(passages: int = 3, *, agreement: float = 0.95, qualified: bool = True) -> Any:
    return Certificate(
        passages=passages,
        questions=50,
        kl=0.06,
        kl_low=0.05,
        kl_high=0.07,
        agreement=agreement,
        agreement_low=agreement - 0.02,
        agreement_high=agreement + 0.02,
        identical=0.5,
        identical_low=0.4,
        identical_high=0.6,
        recovery=0.7,
        recovery_low=0.6,
        recovery_high=0.8,
        qualified=qualified,
    )


def calibration(fingerprint: str, **changed: Any) -> Calibration:
    made = Calibration(
        fingerprint=fingerprint,
        model="some/model",
        dtype="float32",
        settings=SETTINGS,
        digests={},
        prompt_digest=prompt_digest(prompt(1)),
        chosen_on=50,
        compared=24,
        stability=0.8,
        certificates=(certificate(3), certificate(5)),
        targets={"agreement": 0.9},
        seed=0,
        date="2026-01-01T00:00:00+00:00",
        package_version="0",
    )
    return replace(made, **changed)


@pytest.fixture
def model() -> BlockModel:
    return BlockModel(tiny_model(), tiny_tokenizer(), name="some/model")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "kv")


def merge_of(
    model: BlockModel, path: Path, made_with: Mapping[str, str] | None = None, bias: float = 0.1
) -> str:
    """A learned merge in a file."""
    heads, outlines = model.config.num_attention_heads, model.profile.layer_outlines
    kv_heads, size, _ = outlines[0][1]
    merge = LearnedMerge.identity(len(outlines), heads, kv_heads, size)
    merge = replace(merge, bias=merge.bias.detach() + bias)
    save_merge(merge, path, model.fingerprint, made_with or {})
    return str(path)


def path_of(store: DirectoryStore) -> Path:
    path = calibration_path(store)
    assert path is not None
    return path


def calibrated(model: BlockModel, store: DirectoryStore, **changed: Any) -> Calibration:
    made = calibration(model.fingerprint, **changed)
    write_calibration(path_of(store), made)
    return made


# -- the file --------------------------------------------------------------------------------------


def test_calibrations_of_several_models_share_a_file(store: DirectoryStore) -> None:
    path = path_of(store)
    first, second = calibration("1" * 64), calibration("2" * 64, seed=4)
    assert read_calibrations(path) == {}
    write_calibration(path, second)
    write_calibration(path, calibration("1" * 64, seed=9))
    write_calibration(path, first)
    assert read_calibrations(path) == {"1" * 64: first, "2" * 64: second}
    assert json.loads(path.read_text())["calibrations"]["2" * 64]["qualified"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: "{", "is damaged"),
        (lambda _: "[]", "is damaged"),
        (lambda found: {**found, "version": 2}, "of version 2, expected 1"),
        (lambda _: {"version": 1}, "is damaged"),
        (lambda found: _entry(found, seed=...), "is damaged"),
        (lambda found: _entry(found, more=1), "is damaged"),
        (lambda found: _entry(found, certificates=[]), "certificates 0, expected"),
        (lambda found: _entry(found, settings={"sink": "bos"}), "is damaged"),
        (lambda found: _entry(found, certificates=[_wrong("kl", "x")]), "for kl"),
        (lambda found: _entry(found, certificates=[_wrong("passages", None)]), "for passages"),
        (lambda found: _entry(found, certificates=[_wrong("recovery_low", None)]), "recovery_low"),
        (lambda found: _entry(found, settings={**SETTINGS, "merge": None}), "no texts"),
        (lambda found: _entry(found, digests=None), "is damaged"),
    ],
)
def test_a_file_that_is_none_is_refused_and_says_why(
    store: DirectoryStore, change: Any, message: str
) -> None:
    path = path_of(store)
    write_calibration(path, calibration("1" * 64))
    found = change(json.loads(path.read_text()))
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    with pytest.raises(StoreError, match=message):
        read_calibrations(path)
    with pytest.raises(StoreError, match=message):
        write_calibration(path, calibration("2" * 64))


def test_tenants_of_a_store_have_calibrations_of_their_own(
    store: DirectoryStore, model: BlockModel
) -> None:
    def found(namespace: str) -> Calibration | None:
        return BlockAttentionEngine(model, store, namespace=namespace).calibration

    first = calibrated(model, store, namespace="first")
    assert [found(name) for name in ("first", "second", "")] == [first, None, None]
    second = calibrated(model, store, namespace="second", seed=1)
    nobodys = calibrated(model, store, seed=2)
    assert [found(name) for name in ("first", "second", "")] == [first, second, nobodys]
    with pytest.raises(ValueError, match="a namespace is named by"):
        Calibration.from_dict({**first.to_dict(), "namespace": "../up"})


def _wrong(name: str, value: Any) -> dict[str, Any]:
    return {**asdict(certificate()), name: value}


def _entry(found: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The file with other fields in its entry; ``...`` takes one away."""
    (fingerprint,) = found["calibrations"]
    entry = {**found["calibrations"][fingerprint], **changed}
    kept = {name: value for name, value in entry.items() if value is not ...}
    return {**found, "calibrations": {fingerprint: kept}}


def test_the_store_leaves_the_file_alone(store: DirectoryStore, model: BlockModel) -> None:
    made = calibrated(model, store)
    BlockAttentionEngine(model, store).encode(["a passage"])
    assert store.stats().entries == 1
    assert verify(store, delete_damaged=True).ok == 1
    gc(store, set(), grace_s=0)
    assert list(store.keys()) == []
    (store.path / "format.json").unlink()  # the mark, which is then made anew
    again = DirectoryStore(store.path)
    assert read_calibrations(path_of(again)) == {model.fingerprint: made}
    assert calibration_path(MemoryStore(1000)) is None


# -- the engine ------------------------------------------------------------------------------------


def test_the_engine_takes_what_was_not_given(store: DirectoryStore, model: BlockModel) -> None:
    assert BlockAttentionEngine(model, store).defaults == GenerateOptions()
    made = calibrated(model, store)
    engine = BlockAttentionEngine(model, store, promote=None)
    assert engine.calibration == made
    assert (engine.defaults.sink, engine.defaults.merge) == ("head:3", "scale:0.95")
    given = BlockAttentionEngine(model, store, sink="none", promote=1).defaults
    assert (given.sink, given.merge, given.promote) == ("none", "scale:0.95", "1")
    assert BlockAttentionEngine(model, MemoryStore(1 << 20)).calibration is None


def test_calibrated_settings_give_the_answer_that_they_give_when_asked_for(
    store: DirectoryStore, model: BlockModel
) -> None:
    plain = BlockAttentionEngine(model, MemoryStore(1 << 20))
    expected = plain.generate(prompt(3), sink="head:3", merge="scale:0.95", max_new_tokens=4)
    calibrated(model, store)
    engine = BlockAttentionEngine(model, store)
    found = engine.generate(prompt(3), max_new_tokens=4)
    assert found.token_ids == expected.token_ids
    assert engine.generate(prompt(3), sink="none", max_new_tokens=4).stats.misses == 3
    assert engine.generate(prompt(3), max_new_tokens=4).stats.misses == 0


def test_an_answer_comes_with_the_certificate_of_its_kind(
    store: DirectoryStore, model: BlockModel
) -> None:
    made = calibrated(model, store)
    engine = BlockAttentionEngine(model, store)

    def of(given: BlockPrompt, **options: Any) -> Certificate | None:
        return engine.generate(given, max_new_tokens=1, **options).stats.certificate

    three, five = made.certificates
    assert [of(prompt(count)) for count in (1, 3, 4, 5)] == [three, three, five, five]
    assert of(prompt(6)) is None  # nothing was measured for so many
    assert of(prompt(0)) is None  # there is nothing to certify
    assert of(prompt(3), mode="full") is None
    assert of(prompt(3), sink="none") is None
    assert of(prompt(3), positions="composite") is None
    assert of(prompt(3), sink="head:3") == three
    assert of(prompt(3, head="Another head.\n")) is None
    assert of(prompt(3, template=BlockTemplate(after="\n"))) is None
    batch = engine.generate_batch([prompt(3), prompt(4)], max_new_tokens=1)
    assert [one.stats.certificate for one in batch] == [three, five]


def test_what_was_measured_in_the_models_type_says_nothing_of_int8(
    store: DirectoryStore, model: BlockModel
) -> None:
    made = calibrated(model, store)
    BlockAttentionEngine(model, store).precompute(prompt(3).context, as_prompt=True)
    three = made.certificates[0]
    int8 = BlockAttentionEngine(model, store, kv_dtype="int8")
    assert int8.generate(prompt(3), max_new_tokens=1).stats.certificate == three  # as it is stored
    found = int8.generate(prompt(4), max_new_tokens=1).stats
    assert (found.int8_blocks, found.certificate) == (1, None)
    calibrated(model, store, kv_dtype="int8")
    for one in (
        BlockAttentionEngine(model, store, kv_dtype="int8"),
        BlockAttentionEngine(model, store),
    ):
        assert one.generate(prompt(3), max_new_tokens=1).stats.certificate == three


def test_a_calibration_of_before_int8_was_of_the_models_type() -> None:
    made = calibration("f")
    told = made.to_dict()
    del told["kv_dtype"]
    assert Calibration.from_dict(told) == made
    assert made.kv_dtype == "model"
    assert "int8" not in str(made)
    assert "blocks in int8" in str(replace(made, kv_dtype="int8"))
    with pytest.raises(ValueError, match="found 'int4'"):
        Calibration.from_dict({**told, "kv_dtype": "int4"})


def test_a_model_that_was_changed_since_has_no_certificate(
    store: DirectoryStore, model: BlockModel
) -> None:
    calibrated(model, store)
    engine = BlockAttentionEngine(model, store)
    model.hf_model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *args: args[-1] * 0.5)
    assert engine.generate(prompt(3), max_new_tokens=1).stats.certificate is None


def test_certificates_survive_sums_and_dicts() -> None:
    three = ReuseStats("block", 1, 0, 9, 2, certificate=certificate(3))
    five = ReuseStats("block", 1, 0, 9, 2, certificate=certificate(5))
    none = ReuseStats("block", 1, 0, 9, 2)
    assert sum([three, three], ReuseStats("block")).certificate == certificate(3)
    assert (three + none).certificate is (five + three).certificate is None
    for stats in (three, none):
        assert ReuseStats.from_dict(json.loads(json.dumps(asdict(stats)))) == stats


def test_a_file_that_is_given_comes_before_the_one_beside_the_store(
    store: DirectoryStore, model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = calibrated(model, store)
    path = tmp_path / "database" / "calibration.json"
    path.parent.mkdir()
    write_calibration(path, calibration("f" * 64))

    def found(given: Any, store: Any = store) -> Calibration | None:
        return BlockAttentionEngine(model, store, calibration=given).calibration

    assert found(path) == beside  # there is none of this model
    given = calibration(model.fingerprint, seed=1)
    write_calibration(path, given)
    assert found(path) == found(str(path)) == found(path, MemoryStore(1 << 20)) == given
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found("~/database/calibration.json") == given
    engine = BlockAttentionEngine.from_pretrained(
        model.hf_model, tokenizer=tiny_tokenizer(), calibration=path
    )
    assert engine.defaults.sink == "head:3"
    for missing in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match="found no file of calibrations at"):
            found(missing)


def test_a_given_file_that_cannot_be_used_is_not_replaced_by_the_one_beside_the_store(
    store: DirectoryStore, model: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibrated(model, store)
    path = tmp_path / "calibration.json"
    path.write_text("{")
    assert BlockAttentionEngine(model, store, calibration=path).calibration is None
    assert f"going on without a calibration: {path} is damaged" in caplog.text


# -- what is said of it ----------------------------------------------------------------------------


def said(
    caplog: pytest.LogCaptureFixture, engine: BlockAttentionEngine, *prompts: BlockPrompt
) -> list[str]:
    """The warnings of these questions."""
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        for one in prompts:
            engine.generate(one, max_new_tokens=1)
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_qualified_calibration_is_told_in_one_line_in_place_of_the_warning(
    store: DirectoryStore, model: BlockModel, caplog: pytest.LogCaptureFixture
) -> None:
    calibrated(model, store)
    with caplog.at_level(logging.INFO, "blockattn_rag"):
        engine = BlockAttentionEngine(model, store)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("some/model: calibrated: sink=head:3 merge=scale:0.95; 3 passages: ")
    assert "agreement with full mode 95.0 % (93.0 to 97.0), KL 0.0600" in line
    caplog.clear()
    assert said(caplog, engine, prompt(0), prompt(3), prompt(5)) == []


@pytest.mark.parametrize(
    ("changed", "given", "why"),
    [
        ({}, prompt(6), "at most 5 passages, not more"),
        ({}, prompt(3, head="Other.\n"), "another head or block template"),
        (
            {"certificates": (certificate(qualified=False),)},
            prompt(3),
            "did not reach the targets (agr",
        ),
    ],
)
def test_an_answer_that_no_certificate_vouches_for_is_warned_of_once(
    store: DirectoryStore,
    model: BlockModel,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    given: BlockPrompt,
    why: str,
) -> None:
    calibrated(model, store, **changed)
    (warning,) = said(caplog, BlockAttentionEngine(model, store), given, given)
    assert "some/model is not known to be block-fine-tuned" in warning
    assert why in warning
    assert "`blockattn-rag calibrate`" in warning
    assert "`blockattn-rag adapt`" in warning


def test_other_options_than_those_calibrated_are_warned_of(
    store: DirectoryStore, model: BlockModel, caplog: pytest.LogCaptureFixture
) -> None:
    calibrated(model, store)
    engine = BlockAttentionEngine(model, store, sink="none")
    (warning,) = said(caplog, engine, prompt(3))
    assert "other sink was asked for" in warning


def test_an_engine_that_keeps_int8_is_told_that_this_was_not_measured(
    model: BlockModel, store: DirectoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    calibrated(model, store)
    engine = BlockAttentionEngine(model, store, kv_dtype="int8")
    (warning,) = said(caplog, engine, prompt(3))
    assert "measured blocks that are not rounded to int8" in warning


def test_a_calibration_of_another_model_is_not_used_and_the_warning_says_so(
    store: DirectoryStore, model: BlockModel, caplog: pytest.LogCaptureFixture
) -> None:
    write_calibration(path_of(store), calibration("f" * 64))
    engine = BlockAttentionEngine(model, store)
    assert engine.calibration is None
    assert engine.defaults == GenerateOptions()
    (warning,) = said(caplog, engine, prompt(3))
    assert "is of another model, another dtype or another namespace" in warning


def test_a_given_file_without_calibrations_is_told_of(
    store: DirectoryStore, model: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"version": 1, "calibrations": {}}')
    (warning,) = said(caplog, BlockAttentionEngine(model, store, calibration=path), prompt(3))
    assert f"{path} is empty" in warning


def test_a_tuned_model_is_warned_of_as_little_as_before(
    store: DirectoryStore, model: BlockModel, caplog: pytest.LogCaptureFixture
) -> None:
    model.config.block_attention = {"tuned": True}
    calibrated(model, store, certificates=(certificate(qualified=False),))
    assert said(caplog, BlockAttentionEngine(model, store), prompt(3)) == []


def test_a_calibration_on_questions_that_its_fits_saw_says_so_wherever_it_is_read(
    store: DirectoryStore, model: BlockModel, caplog: pytest.LogCaptureFixture
) -> None:
    seen = replace(certificate(qualified=False), seen=4)
    made = calibrated(model, store, certificates=(seen, certificate(5)))
    (entry,) = json.loads(path_of(store).read_text())["calibrations"].values()
    assert entry["qualified"] is made.qualified is False
    assert entry["reason"] == made.reason
    assert made.reason.startswith("4 of the 50 questions it was certified on are among those")
    assert "give `blockattn-rag calibrate` 8 more that are not (--questions)" in made.reason
    (warning,) = said(caplog, BlockAttentionEngine(model, store), prompt(3))
    assert f"does not qualify: {made.reason}" in warning
    assert "50 questions, 4 of them known from fitting" in warning
    assert calibration("f").reason == ""


def test_a_damaged_file_is_warned_of_and_the_engine_answers_without_it(
    store: DirectoryStore, model: BlockModel, caplog: pytest.LogCaptureFixture
) -> None:
    path_of(store).write_text("{")
    engine = BlockAttentionEngine(model, store)
    assert engine.defaults == GenerateOptions()
    first, second = said(caplog, engine, prompt(3))
    assert first.startswith(f"going on without a calibration: {path_of(store)} is damaged")
    assert "Its calibration cannot be used." in second


def test_a_correction_that_is_given_goes_with_the_calibrated_sink(
    model: BlockModel, store: DirectoryStore, tmp_path: Path
) -> None:
    calibrated(model, store)
    path = saved(correction_of(model, sink="head:3"), tmp_path)
    engine = BlockAttentionEngine(model, store, correction=path)
    assert (engine.defaults.sink, engine.defaults.correction) == ("head:3", path)
    with pytest.raises(ValueError, match="found sink='bos'; give it that sink, or correction='no"):
        engine.generate(prompt(1), sink="bos")


def test_a_correction_comes_with_its_sink_and_is_used_as_it_was_measured(
    store: DirectoryStore, model: BlockModel, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    correction = correction_of(model, sink="head:3")
    path = saved(correction, tmp_path)
    settings = {**PLAIN_SETTINGS, "sink": "head:3", "correction": path}
    calibrated(model, store, settings=settings, digests={"correction": correction.digest})
    found = BlockAttentionEngine(model, store).defaults
    assert (found.sink, found.correction) == ("head:3", path)
    other = BlockAttentionEngine(model, store, sink="none").defaults
    assert (other.sink, other.correction) == ("none", "none")
    assert not caplog.records
    saved(correction_of(model, sink="head:3", size=0.2), tmp_path)
    assert BlockAttentionEngine(model, store).calibration is None
    assert f"the correction in {path} has changed since; calibrate anew" in caplog.text


def test_a_learned_merge_that_has_changed_is_not_used(
    store: DirectoryStore, model: BlockModel, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = merge_of(model, tmp_path / "merge.safetensors")
    settings = {**PLAIN_SETTINGS, "merge": path}
    options = GenerateOptions(merge=path)
    digests = settings_digests(model, options)
    assert digests == {"merge": merge_digest(path)}
    calibrated(model, store, settings=settings, digests=digests)
    assert BlockAttentionEngine(model, store).defaults.merge == path
    assert not caplog.records
    merge_of(model, Path(path), bias=0.2)
    assert BlockAttentionEngine(model, store).calibration is None
    assert f"the merge in {path} has changed since; calibrate anew" in caplog.text
    other = BlockModel(tiny_model(seed=1), tiny_tokenizer())
    with pytest.raises(ValueError, match="found a learned merge of the model"):
        settings_digests(other, options)


def test_a_reader_that_is_gone_or_another_is_warned_of_and_not_used(
    store: DirectoryStore, model: BlockModel, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = tmp_path / "reader"
    reader = Reader.new(model.hf_model, rank=2, seed=1)
    reader.save(folder, {"fingerprint": model.fingerprint})
    settings = {**PLAIN_SETTINGS, "reader": str(folder)}
    calibrated(model, store, settings=settings, digests={"reader": reader.digest})
    assert BlockAttentionEngine(model, store).defaults.reader == str(folder)
    assert not caplog.records
    Reader.new(model.hf_model, rank=2, seed=2).save(folder, {"fingerprint": model.fingerprint})
    assert BlockAttentionEngine(model, store).calibration is None
    assert "has changed since; calibrate anew" in caplog.text
    folder.rename(tmp_path / "elsewhere")
    assert BlockAttentionEngine(model, store).calibration is None
    assert "its settings cannot be used" in caplog.text


def test_a_reader_that_is_replaced_or_goes_while_it_is_in_use_is_certified_no_more(
    store: DirectoryStore, model: BlockModel, tmp_path: Path
) -> None:
    folder = tmp_path / "reader"
    reader = Reader.new(model.hf_model, rank=2, seed=1)
    reader.save(folder, {"fingerprint": model.fingerprint})
    settings = {**PLAIN_SETTINGS, "reader": str(folder)}
    made = calibrated(model, store, settings=settings, digests={"reader": reader.digest})
    engine = BlockAttentionEngine(model, store)
    found = engine.generate(prompt(3), max_new_tokens=1).stats.certificate
    assert found == made.certificates[0]
    Reader.new(model.hf_model, rank=2, seed=2).save(folder, {"fingerprint": model.fingerprint})
    assert engine.generate(prompt(3), max_new_tokens=1).stats.certificate is None
    folder.rename(tmp_path / "elsewhere")
    stats = engine.generate(prompt(3), reader="none", max_new_tokens=1).stats
    assert (stats.hits, stats.certificate) == (4, None)
