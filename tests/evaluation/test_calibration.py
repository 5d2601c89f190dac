"""Calibration: what is compared, what is chosen, what is certified, and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockattn_rag.engine.calibration import prompt_digest
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.errors import DataError
from blockattn_rag.evaluation.calibration.certify import certificate, clopper_pearson
from blockattn_rag.evaluation.calibration.pairs import Pair, Teacher
from blockattn_rag.evaluation.calibration.run import CalibrationReport, calibrate
from blockattn_rag.evaluation.calibration.search import search, simplest
from blockattn_rag.evaluation.calibration.settings import (
    MERGES,
    PLAIN,
    SINKS,
    Setting,
    stages,
    usable_sinks,
)
from blockattn_rag.evaluation.fidelity import (
    FidelityRecord,
    FidelityReport,
    compare_modes,
    full_answer,
)
from blockattn_rag.evaluation.modes import mode_options
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import CHAT, Passage
from blockattn_rag.prompts.tokenization import BlockTokenizer
from tests.models import shared_tiny_llama, tiny_tokenizer

NEW = 4
TARGETS = {"agreement": 0.9}


# -- the search, on losses that are made up --------------------------------------------------------


class Losses:
    """A measure of made-up losses, the same at every call; it notes what it was asked for."""

    def __init__(self, spread: float = 0.02, **means: float) -> None:
        self.means = {"sink=head:4": 0.1, "merge=scale:0.95": 0.08, "promote=1": 0.04, **means}
        self.spread = spread
        self.calls: list[tuple[str, int, int]] = []

    def __call__(
        self, stage: str, settings: Sequence[Setting], count: int
    ) -> dict[Setting, NDArray[np.float64]]:
        self.calls.append((stage.partition(":")[0], len(settings), count))
        return {one: self.of(one)[:count] for one in settings}

    def of(self, setting: Setting) -> NDArray[np.float64]:
        """Block mode loses 0.2, and each part of a setting changes that."""
        parts = [] if setting == PLAIN else setting.mode.split("+")
        mean = 0.2 * math.prod(self.means.get(part, 0.3) / 0.2 for part in parts)
        own = sum(map(ord, setting.mode))
        noise = np.random.default_rng(own).normal(size=200)
        return mean + self.spread * noise


def test_the_search_finds_the_best_of_every_stage() -> None:
    measure = Losses()
    found = search(stages(SINKS), measure, 50)
    assert found.setting == Setting("head:4", merge="scale:0.95", promote="1")
    assert found.compared == len(SINKS) + len(MERGES) + 4
    assert found.stability > 0.95
    assert {
        PLAIN,
        Setting("head:4"),
        Setting("head:4", merge="scale:0.95"),
    } <= found.finalists.keys()
    assert all(len(losses) == 50 for losses in found.finalists.values())


def test_the_pairs_double_and_the_worse_half_goes() -> None:
    measure = Losses()
    search(stages(SINKS), measure, 50)
    merges = 2 + len(MERGES)
    halves = [merges, math.ceil(merges / 2), math.ceil(math.ceil(merges / 2) / 2)]
    found = [(number, count) for stage, number, count in measure.calls if stage == "merges"]
    # Plain block mode, and the best setting before the stage, are measured to the end.
    assert [count for _, count in found] == [16, 32, 50]
    assert all(half <= number <= half + 2 for (number, _), half in zip(found, halves, strict=True))
    measure.calls.clear()
    search(stages(SINKS), measure, 9)
    assert {count for *_, count in measure.calls} == {9}


def test_plain_block_mode_is_measured_to_the_end_even_if_it_is_the_worst() -> None:
    measure = Losses(**dict.fromkeys((f"sink={sink}" for sink in SINKS), 0.05))
    found = search({"sinks": stages(SINKS)["sinks"]}, measure, 50)
    assert len(found.finalists[PLAIN]) == 50
    assert len(found.finalists) < len(SINKS)


def test_what_is_within_one_standard_error_of_the_best_is_as_good_and_the_simplest_is_taken() -> (
    None
):
    rng = np.random.default_rng(0)
    common, own = rng.normal(size=50), rng.normal(size=50)
    own -= own.mean()
    best, simple = Setting("head:4", merge="scale:0.95", promote="1"), Setting("head:4")
    error = 0.1 * own.std(ddof=1) / math.sqrt(50)
    for step, expected in ((0.9, simple), (1.1, best)):
        # All questions are harder or easier alike; that is no error of the difference.
        losses = {best: common, simple: common + 0.1 * own + step * error}
        assert simplest(losses) == expected


def test_of_settings_that_are_equally_simple_the_best_is_taken() -> None:
    rng = np.random.default_rng(0)
    best, other = Setting("head:4"), Setting("bos")
    common, own = rng.normal(size=50), rng.normal(size=50)
    for first, second in ((best, other), (other, best)):
        losses = {PLAIN: common + 9, first: common, second: common}
        losses[other] = common + 0.1 * (own - own.mean()) + 1e-4
        assert simplest(losses) == best


def test_settings_that_compute_nothing_per_question_come_before_those_that_do() -> None:
    ordered = [
        PLAIN,
        Setting("head:4"),
        Setting(reader="folder"),
        Setting("head:4", merge="scale:0.95"),
        Setting("head:4", "scale:0.95", reader="folder"),
        Setting(promote="1"),
        Setting("head:4", promote="1"),
        Setting(promote="attention:1"),
        Setting(promote="2"),
    ]
    assert [one.cost for one in ordered] == sorted(one.cost for one in ordered)


def test_a_choice_by_chance_is_not_stable() -> None:
    close = dict.fromkeys((f"sink={sink}" for sink in SINKS), 0.199)
    found = search({"sinks": stages(SINKS)["sinks"]}, Losses(0.05, **close), 20)
    assert found.stability < 0.9


# -- settings --------------------------------------------------------------------------------------


def test_every_setting_is_a_mode_of_the_evaluation() -> None:
    of_all = stages(SINKS)
    assert list(of_all) == ["sinks", "merges", "promotion"]
    best = Setting("head:4", merge="scale:0.9:0.8")
    for stage in of_all.values():
        for setting in stage(best):
            options = GenerateOptions.parse(mode_options(setting.mode), GenerateOptions())
            assert {name: getattr(options, name) for name in setting.options} == setting.options
    assert PLAIN.mode == "block"


def test_a_reader_is_tried_with_the_best_and_with_the_sink_alone() -> None:
    own = Setting("head:4", reader="folder")
    of_all = stages(["none"], merges=(), reader=own, most_promoted=0)
    assert list(of_all) == ["sinks", "reader"]
    best = Setting("bos", correction="kv.safetensors", merge="scale:0.9")
    tried = of_all["reader"](best)
    bare = replace(best, merge="none", reader="folder")
    assert tried == [replace(best, reader="folder"), bare, own]
    assert of_all["reader"](Setting("head:4")) == [own]


def test_a_learned_merge_is_tried_with_the_best_and_with_what_it_was_made_with() -> None:
    own = Setting("head:4", merge="m.safetensors")
    for merges in ((), ("scale:0.9",)):
        of_all = stages(["none"], merges, None, 0, merged=own)
        assert list(of_all) == ["sinks", "merges"]
        best = Setting("bos")
        tried = [replace(best, merge=merge) for merge in (*merges, "m.safetensors")]
        assert of_all["merges"](best) == [*tried, own]


def test_a_correction_is_tried_with_its_own_sink_before_merges() -> None:
    corrected = Setting("head:4", correction="kv.safetensors")
    of_all = stages(["none", "bos"], ["scale:0.9"], None, 0, corrected)
    assert list(of_all) == ["sinks", "correction", "merges"]
    assert of_all["correction"](Setting("bos")) == [corrected]
    assert of_all["merges"](corrected) == [replace(corrected, merge="scale:0.9")]
    assert corrected.mode == "sink=head:4+correction=kv.safetensors"


def test_models_without_relay_attention_try_no_merge_and_no_promotion_by_attention() -> None:
    of_all = stages(SINKS, most_promoted=2, supports_relay=False)
    assert list(of_all) == ["sinks", "promotion"]
    assert [setting.promote for setting in of_all["promotion"](PLAIN)] == ["1", "2"]


def test_sinks_that_a_model_lacks_or_that_are_the_same_are_left_out() -> None:
    assert usable_sinks(BlockTokenizer(tiny_tokenizer())) == [
        "none",
        "bos",  # which is the first token of the head
        "head:4",
        "head:16",
        "first-block",
    ]
    without = BlockTokenizer(tiny_tokenizer(bos=False))
    assert usable_sinks(without, ["bos", "head:1", "head:9999"]) == ["head:1"]


# -- certificates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # R: binom.test(k, n)$conf.int
        (0, 10, 0.0, 0.3084971),
        (10, 10, 0.6915029, 1.0),
        (5, 10, 0.1870860, 0.8129140),
        (1, 3, 0.0084038, 0.9057007),
        (930, 1000, 0.9123856, 0.9450240),
    ],
)
def test_shares_have_exact_intervals(successes: int, trials: int, low: float, high: float) -> None:
    found = clopper_pearson(successes, trials)
    assert found == pytest.approx((successes / trials, low, high), abs=2e-4)
    if trials < 100:
        assert found == pytest.approx((successes / trials, low, high), abs=1e-6)


def report_of(agreement: Sequence[float], block: float = 0.2, mode: float = 0.1) -> FidelityReport:
    """A report on answers of ten tokens."""
    kl = {"floor": 1e-12, "block": block, "sink=bos": mode}
    records = [
        FidelityRecord(str(n), "d", name, 10, found + n * found / 10, found, share)
        for name, found in kl.items()
        for n, share in enumerate(agreement)
    ]
    return FidelityReport({}, records)


def test_a_certificate_holds_the_reports_figures() -> None:
    report = report_of([0.9, 1.0, 1.0, 0.8, 1.0, 1.0])
    found, expected = certificate(report, "sink=bos", 5, TARGETS), report["sink=bos"]
    assert (found.passages, found.questions) == (5, 6)
    assert (found.kl, found.kl_low, found.kl_high) == expected.kl
    assert expected.recovery is not None
    assert (found.recovery, found.recovery_low, found.recovery_high) == expected.recovery
    assert found.agreement == pytest.approx(0.95)
    assert (found.identical, found.identical_low, found.identical_high) == clopper_pearson(4, 6)


def test_questions_that_a_fit_was_made_with_do_not_qualify_it() -> None:
    report = report_of([1.0] * 40)
    for seen in (0, 1):
        found = certificate(report, "sink=bos", 5, TARGETS, seen)
        assert (found.seen, found.qualified) == (seen, not seen)


def test_a_few_tokens_that_all_agree_prove_little() -> None:
    few = certificate(report_of([1.0] * 3), "sink=bos", 5, TARGETS)
    assert (few.agreement, few.agreement_high) == (1, 1)
    assert few.agreement_low == pytest.approx(clopper_pearson(30, 30).low)
    assert not few.qualified
    assert certificate(report_of([1.0] * 30), "sink=bos", 5, TARGETS).qualified


def test_the_spread_between_questions_counts_and_not_that_of_tokens_alone() -> None:
    found = certificate(report_of([1.0] * 15 + [0.0]), "sink=bos", 5, TARGETS)
    assert found.agreement_low < clopper_pearson(150, 160).low
    even = certificate(report_of([0.8] * 5), "sink=bos", 5, TARGETS)
    assert (even.agreement_low, even.agreement_high) == clopper_pearson(40, 50)[1:]


def test_every_target_must_be_reached() -> None:
    report = report_of([1.0] * 40)
    for wanted, qualified in ((0.4, True), (0.6, False)):
        targets = {**TARGETS, "recovery": wanted}
        assert certificate(report, "sink=bos", 5, targets).qualified is qualified
    assert certificate(report, "block", 5, TARGETS).qualified
    assert not certificate(report, "block", 5, {"recovery": 0.1}).qualified
    alike = report_of([1.0] * 40, block=2e-12, mode=2e-12)
    for mode in ("block", "sink=bos"):
        assert certificate(alike, mode, 5, {"recovery": 0.9}).qualified  # nothing to recover


def test_a_question_on_which_block_mode_is_full_mode_does_not_qualify_a_setting() -> None:
    """Such as one without passages, or one where numbers of 16 bits round more than block mode."""
    report = report_of([1.0] * 40, mode=0.3)
    records = [
        replace(r, kl=0.0) if (r.id, r.mode) == ("0", "block") else r for r in report.records
    ]
    found = certificate(FidelityReport({}, records), "sink=bos", 5, {"recovery": 0.4})
    assert found.recovery is not None
    assert found.recovery < 0
    assert not found.qualified


# -- a calibration of a tiny model -----------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return BlockAttentionEngine(BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer()))


def pairs_of(engine: BlockAttentionEngine, numbers: range, passages: int = 2) -> list[Pair]:
    tokenizer = engine.model.tokenizer.tokenizer
    made = []
    for number in numbers:
        shown = [
            Passage("", f"Lake {number + n} is {number} metres deep.") for n in range(passages)
        ]
        question = f"How deep is lake {number}?"
        made.append(Pair(question, CHAT.prompt(question, shown, tokenizer)))
    return made


def run(engine: BlockAttentionEngine, records: Path, **changed: Any) -> CalibrationReport:
    options: dict[str, Any] = {
        "choose": pairs_of(engine, range(4)),
        "certify": [*pairs_of(engine, range(4, 8)), *pairs_of(engine, range(4, 8), 3)],
        "stages": stages(["none", "bos", "head:4"], ("scale:0.5", "bias:-3"), None, 1),
        "records_path": records,
        "targets": {"agreement": 0.0},
        "max_new_tokens": NEW,
        **changed,
    }
    return calibrate(engine, options.pop("choose"), options.pop("certify"), **options)


def test_a_choice_that_saw_the_questions_is_not_qualified_and_one_that_did_not_is(
    engine: BlockAttentionEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "blockattn_rag.evaluation.calibration.search"
    certify = pairs_of(engine, range(4, 8))
    # A fit is known by the path in the settings; here by a word that needs no file.
    known = [replace(pair, seen_by=frozenset({"scale:0.5"})) for pair in certify[:3]]
    for merge, expected in (("scale:0.5", 3), ("bias:-3", 0)):
        monkeypatch.setattr(
            f"{module}.simplest", lambda found, m=merge: next(s for s in found if s.merge == m)
        )
        made = run(engine, tmp_path / "r.jsonl", certify=[*known, certify[3]]).calibration
        assert [one.seen for one in made.certificates] == [expected]
        assert made.qualified == (expected == 0)
        assert made.reason.startswith("3 of the 4 questions") == (expected == 3)
        assert ("6 more" in made.reason) == (expected == 3)


def losses_by_hand(
    engine: BlockAttentionEngine, settings: Sequence[Setting], pairs: Sequence[Pair]
) -> dict[Setting, float]:
    """The mean divergences, the first token counted twice."""
    found: dict[Setting, list[float]] = {one: [] for one in settings}
    for pair in pairs:
        answer, expected = full_answer(engine, pair.prompt, NEW)
        for setting in settings:
            logits = engine.answer_logits(pair.prompt, answer, **mode_options(setting.mode))
            kl = (expected.exp() * (expected - logits.double().log_softmax(-1))).sum(-1)
            found[setting].append(float((kl.sum() + kl[0]) / (len(kl) + 1)))
    return {one: float(np.mean(each)) for one, each in found.items()}


def test_the_setting_nearest_to_full_mode_is_chosen_and_certified_on_others(
    engine: BlockAttentionEngine, tmp_path: Path
) -> None:
    report = run(engine, tmp_path / "r.jsonl", package_version="9", seed=3)
    made, choice = report.calibration, report.choice
    choose = pairs_of(engine, range(4))
    by_hand = losses_by_hand(engine, list(choice.finalists), choose)
    assert {s: m for s, m, _ in report.finalists} == pytest.approx(by_hand, rel=1e-4, abs=1e-7)
    assert report.finalists[0][0] == min(by_hand, key=lambda one: by_hand[one])
    assert choice.setting == simplest(choice.finalists)
    assert made.settings == choice.setting.options
    assert (made.chosen_on, made.seed, made.package_version) == (4, 3, "9")
    assert (made.fingerprint, made.dtype) == (engine.model.fingerprint, "float32")
    assert made.prompt_digest == prompt_digest(choose[0].prompt)
    assert [(one.passages, one.questions) for one in made.certificates] == [(2, 4), (3, 4)]
    assert [one.passages for one in report.plain] == [2, 3]
    assert made.qualified
    assert report.to_dict()["finalists"][0]["mode"] == report.finalists[0][0].mode


def test_a_calibration_that_was_interrupted_measures_only_what_is_missing(
    engine: BlockAttentionEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[str, str]] = []

    def stopping(after: float) -> Any:
        def compare_some(engine: Any, pair: Pair, modes: Sequence[str], *rest: Any) -> Any:
            if len(measured) >= after:
                raise KeyboardInterrupt
            measured.extend((pair.id, mode) for mode in modes)
            return compare_modes(engine, pair, modes, *rest)

        return compare_some

    whole = run(engine, tmp_path / "whole.jsonl")
    records = tmp_path / "r.jsonl"
    monkeypatch.setattr(f"{calibrate.__module__}.compare_modes", stopping(after=20))
    with pytest.raises(KeyboardInterrupt):
        run(engine, records)
    monkeypatch.setattr(f"{calibrate.__module__}.compare_modes", stopping(after=math.inf))
    again = run(engine, records)
    assert len(set(measured)) == len(measured)
    assert again.choice.setting == whole.choice.setting
    assert again.calibration.certificates == whole.calibration.certificates
    before = len(measured)
    run(engine, records, seed=5)
    assert len(measured) == before
    with pytest.raises(DataError, match="records made with other settings"):
        run(engine, records, noted={"reader": "another"})


def test_halves_that_share_a_question_and_other_mistakes_are_refused(
    engine: BlockAttentionEngine, tmp_path: Path
) -> None:
    shared = pairs_of(engine, range(3, 6))
    with pytest.raises(DataError, match="1 questions are in both halves, such as 'How deep"):
        run(engine, tmp_path / "r.jsonl", certify=shared)
    with pytest.raises(DataError, match="found 4 pairs to choose on and 1 to certify on"):
        run(engine, tmp_path / "r.jsonl", certify=pairs_of(engine, range(4, 5)))
    apart = [*pairs_of(engine, range(4, 5)), *pairs_of(engine, range(5, 6), 3)]
    with pytest.raises(DataError, match="no number of passages with 2 pairs or more"):
        run(engine, tmp_path / "r.jsonl", certify=apart)
    bare = [Pair(f"{n}?", CHAT.prompt("?", (), engine.model.tokenizer.tokenizer)) for n in "ab"]
    with pytest.raises(DataError, match="different heads or block templates"):
        run(engine, tmp_path / "r.jsonl", certify=bare)


def test_full_mode_answers_once_while_there_is_room(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pairs_of(engine, range(2))
    size = 4 * NEW * 264  # float32, tokens of the answer, tokens of the vocabulary
    teacher = Teacher(engine, NEW, max_bytes=size)
    fresh = [teacher(first), teacher(second)]
    calls: list[str] = []
    answered = full_answer

    def counted(engine: Any, prompt: Any, tokens: int) -> Any:
        calls.append(prompt.final)
        return answered(engine, prompt, tokens)

    monkeypatch.setattr("blockattn_rag.evaluation.calibration.pairs.full_answer", counted)
    again = [teacher(first), teacher(second)]
    assert calls == [second.prompt.final]
    for (answer, expected), (known, kept) in zip(fresh, again, strict=True):
        assert known == answer
        assert kept.dtype == expected.dtype
        np.testing.assert_allclose(kept.numpy(), expected.numpy(), rtol=1e-6)


def test_pairs_are_named_by_their_prompt(engine: BlockAttentionEngine) -> None:
    (two,), (three,) = pairs_of(engine, range(1)), pairs_of(engine, range(1), 3)
    assert (two.passages, three.passages) == (2, 3)
    assert two.question == three.question
    assert len({two.id, three.id, pairs_of(engine, range(1, 2))[0].id}) == 3
    assert pairs_of(engine, range(1))[0].id == two.id
