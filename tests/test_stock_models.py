"""The benchmark of repairs: its runs, other models, samples to train on, sparse recomputation."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from typer.testing import CliRunner

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.evaluation import read_samples
from blockattn_rag.evaluation.fidelity import FidelityRecord, full_answer
from blockattn_rag.evaluation.run import make_prompt
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.training.data import SampleEncoder
from tests.engines import tuned_engine
from tests.evaluation.samples import record, write_jsonl
from tests.models import tiny_tokenizer
from tests.training.runs import write_model

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import stock_comparison
import stock_models
from sparse_recomputation import recomputed_logits
from stock_comparison import Comparison
from stock_records import FULL, Row, append_rows, read_rows

ANSWER = [65, 66, 67]
SMALL = ["--batch-size", 2, "--max-new-tokens", 4, "--num-passages", 3]
# Float32 rounds at 6e-8 of values of about 1; three layers of 32 sums of 64 lose three digits.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return tuned_engine()


def run(*arguments: object, refused: bool = False) -> str:
    """What the command prints, without the frame of an error."""
    found = CliRunner().invoke(stock_models.app, [*map(str, arguments)])
    assert found.exit_code == (2 if refused else 0), found.output
    return " ".join(found.output.replace("│", "").split())


def use(engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark find this engine in place of any model."""
    monkeypatch.setattr(stock_comparison, "_engine", lambda *_: engine)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", map(record, range(1, 4)))


def recomputed(engine: BlockAttentionEngine, data: Path, first: int, **how: Any) -> Tensor:
    (sample, *_) = read_samples(data)
    prompt = make_prompt(engine, CHAT, sample, "block")
    return recomputed_logits(engine, prompt, ANSWER, GenerateOptions(**how), first)


@pytest.mark.parametrize("first", [1, 5])
def test_recomputed_tokens_attend_to_all_before_them_and_to_nothing_behind(
    engine: BlockAttentionEngine, data: Path, first: int
) -> None:
    """One passage after the other, in plain causal forwards over what stands before it."""
    (sample, *_) = read_samples(data)
    prompt = make_prompt(engine, CHAT, sample, "block")
    prepared = engine._runner.prepare(prompt, GenerateOptions())
    assert prepared.context is not None
    model = engine.model
    stored = model.cache_for(prepared.context)
    assert stored is not None
    ids, cache = prepared.context_ids, DynamicCache()
    head, *passages = prepared.context.blocks

    def keep(start: int, end: int) -> None:
        for index, layer in enumerate(stored.layers):
            keys, values = layer.keys, layer.values  # type: ignore[union-attr]
            cache.update(keys[:, :, start:end], values[:, :, start:end], index)  # type: ignore[index]

    with torch.inference_mode():
        keep(0, head.kv.num_tokens)
        for block in passages:
            end = block.start + block.kv.num_tokens
            until = min(block.start + first, end)
            model.hf_model(torch.tensor([ids[block.start : until]]), past_key_values=cache)
            keep(until, end)
        expected = model.answer_logits(ids, prepared.final_ids, ANSWER, cache)
    assert len(passages) > 1
    found = recomputed(engine, data, first)
    assert torch.allclose(found, expected, atol=TOLERANCE)


def test_all_tokens_recomputed_are_full_attention_and_none_are_block_attention(
    engine: BlockAttentionEngine, data: Path
) -> None:
    (sample, *_) = read_samples(data)
    prompt = make_prompt(engine, CHAT, sample, "block")
    full, block = (engine.answer_logits(prompt, ANSWER, mode=mode) for mode in ("full", "block"))
    assert not torch.allclose(full, block, atol=10 * TOLERANCE)
    assert torch.allclose(recomputed(engine, data, 10_000), full, atol=TOLERANCE)
    assert torch.allclose(recomputed(engine, data, 0), block, atol=TOLERANCE)


def test_a_run_adds_what_is_missing_alone(
    engine: BlockAttentionEngine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(engine, monkeypatch)
    asked: list[str] = []
    rows_of = Comparison.rows

    def watched(self: Any, mode: str, answers_too: bool) -> list[Row]:
        asked.append(mode)
        return rows_of(self, mode, answers_too)

    monkeypatch.setattr(Comparison, "rows", watched)
    output = tmp_path / "rows.csv"
    common = ["measure", "--data", data, "--output", output, *SMALL, "--answered", "block"]
    run(*common, "--modes", "block", "--limit", 2)
    modes = "block,recompute=2,sink=first-block,promote=1,closed-book"
    run(*common, "--modes", modes)
    assert asked == ["block", *modes.split(",")[1:], *modes.split(",")]
    rows = read_rows(output)
    assert len({(row.id, row.mode) for row in rows}) == len(rows) == 3 * 6
    assert {row.mode for row in rows if row.accuracy is not None} == {"full", "block"}


def test_a_run_with_other_files_or_prompts_is_not_added_to(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_comparison, "_engine", lambda *_: pytest.fail("nothing is loaded"))
    output = tmp_path / "rows.csv"
    append_rows(output, [Row("1", "block", "ab12", 3, 0.4, 0.2, 0.5)], [])
    before = output.read_bytes()
    told = run("measure", "--data", data, "--output", output, "--modes", "block", refused=True)
    assert "name another --output" in told
    assert output.read_bytes() == before


class TestAnotherModel:
    """``model=FOLDER``: block mode of a model that was fine-tuned from the stock model."""

    @pytest.fixture
    def stock(self, tmp_path: Path) -> Path:
        return write_model(tmp_path / "stock")

    @pytest.fixture
    def tuned(self, tmp_path: Path) -> Path:
        return write_model(tmp_path / "tuned", seed=1)

    @pytest.fixture
    def common(self, stock: Path, data: Path, tmp_path: Path) -> list[object]:
        paths = ["--data", data, "--output", tmp_path / "rows.csv"]
        return ["measure", "--model", stock, *paths, *SMALL]

    def test_is_compared_with_the_stock_model_along_its_answers_and_answers_itself(
        self, stock: Path, tuned: Path, common: list[object], data: Path, tmp_path: Path
    ) -> None:
        mode = f"model={tuned}+sink=head:4"
        run(*common, "--modes", f"block,model={stock},{mode}", "--answered", mode)
        rows = {(row.id, row.mode): row for row in read_rows(tmp_path / "rows.csv")}
        engine, other = (BlockAttentionEngine.from_pretrained(m) for m in (str(stock), str(tuned)))
        for sample in read_samples(data):
            prompt = make_prompt(engine, CHAT, sample, "block")
            answer, expected = full_answer(engine, prompt, 4)
            logits = other.answer_logits(prompt, answer, mode="block", sink="head:4")
            kl = FidelityRecord.compared(sample, mode, logits, expected).kl
            found = rows[sample.id, mode]
            assert kl > 0.1
            assert found.kl == pytest.approx(kl, rel=1e-3)
            assert found.accuracy is not None
            same = rows[sample.id, f"model={stock}"]
            assert same.kl == pytest.approx(rows[sample.id, "block"].kl, rel=1e-3)

    def test_answers_with_its_own_weights(
        self, stock: Path, tuned: Path, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mode = f"model={tuned}"
        engines = stock_comparison.engines_of(str(stock), [mode])
        given: list[str] = []
        monkeypatch.setattr(Comparison, "_scored", lambda *found: given.extend(found[-1]))
        samples = read_samples(data)
        Comparison(engines, samples, 8, {FULL: "", mode: ""}).rows(mode, answers_too=True)
        prompts = [make_prompt(engines[FULL], CHAT, sample, "block") for sample in samples]
        own, stocks = (
            [engine.generate(p, max_new_tokens=8, do_sample=False).text for p in prompts]
            for engine in (engines[mode], engines[FULL])
        )
        assert given == own != stocks

    def test_is_loaded_once(
        self, engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded: list[str] = []

        def load(model: str, _: object) -> BlockAttentionEngine:
            loaded.append(model)
            return engine

        monkeypatch.setattr(stock_comparison, "_engine", load)
        engines = stock_comparison.engines_of("a", ["block", "model=b", "model=b+sink=bos"])
        assert loaded == ["a", "b"]
        assert list(engines) == [FULL, "block", "model=b", "model=b+sink=bos"]

    def test_that_was_trained_anew_is_another_setup(
        self, tuned: Path, common: list[object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(*common, "--modes", f"model={tuned}")
        write_model(tuned, seed=2)
        monkeypatch.setattr(stock_comparison, "_engine", lambda *_: pytest.fail("loaded"))
        assert "name another --output" in run(*common, "--modes", f"model={tuned}", refused=True)

    def test_with_another_tokenizer_is_refused(self, tuned: Path, common: list[object]) -> None:
        tiny_tokenizer(bos=False).save_pretrained(tuned)
        assert "the tokenizer in" in run(*common, "--modes", f"model={tuned}", refused=True)

    def test_is_refused_where_there_is_none_or_no_block_mode_follows(
        self, tmp_path: Path, common: list[object]
    ) -> None:
        told = run(*common, "--modes", f"model={tmp_path / 'none'}", refused=True)
        assert "found no weights" in told
        told = run(*common, "--modes", "model=tuned+closed-book", refused=True)
        assert "expected a block mode" in told


def test_recomputation_neither_answers_nor_has_costs(data: Path, tmp_path: Path) -> None:
    common = ["--data", data, "--output", tmp_path / "out.csv", "--modes", "recompute=2"]
    common += ["--model", tmp_path / "none"]
    told = run("measure", *common, "--answered", "recompute=2", refused=True)
    assert "leave them out of --answered" in told
    assert "leave them out of costs" in run("costs", *common, refused=True)


def test_recomputation_of_no_number_of_tokens_is_refused_before_anything_is_loaded(
    data: Path, tmp_path: Path
) -> None:
    common = ["--data", data, "--output", tmp_path / "out.csv", "--model", tmp_path / "none"]
    told = run("measure", *common, "--modes", "recompute=abc", refused=True)
    assert "expected a number of tokens" in told


def test_a_mode_of_int8_answers_from_blocks_in_int8(
    engine: BlockAttentionEngine, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering: list[BlockAttentionEngine] = []
    answer = BlockAttentionEngine.generate_batch

    def watched(self: BlockAttentionEngine, *args: Any, **how: Any) -> Any:
        answering.append(self)
        return answer(self, *args, **how)

    monkeypatch.setattr(BlockAttentionEngine, "generate_batch", watched)
    use(engine, monkeypatch)
    mode = "sink=bos+kv_dtype=int8"
    engines = stock_comparison.engines_of("tuned", [mode])
    comparison = Comparison(engines, read_samples(data), 4, {FULL: "", mode: ""})
    stored = set(engine.store.keys())
    comparison.rows(mode, answers_too=True)
    assert [one.kv_dtype for one in answering] == ["int8"]
    assert set(engine.store.keys()) == stored


def test_full_mode_is_no_mode_to_compare(data: Path, tmp_path: Path) -> None:
    common = ["--data", data, "--output", tmp_path / "out.csv", "--model", tmp_path / "none"]
    assert "always measured" in run("measure", *common, "--modes", "full,block", refused=True)


def test_costs_are_those_of_each_mode(
    engine: BlockAttentionEngine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(engine, monkeypatch)
    output = tmp_path / "costs.csv"
    modes = "full,block,promote=1,model=tuned"
    run("costs", "--data", data, "--output", output, "--modes", modes, "--limit", 2)
    lines = [line.split(",") for line in output.read_text(encoding="utf-8").splitlines()[1:]]
    tokens = {mode: float(count) for mode, count, _ in lines}
    assert tokens["full"] > tokens["promote=1"] > tokens["block"] == tokens["model=tuned"]


class TestAnswersToTrainOn:
    ENDED = (*ANSWER, 257)

    @pytest.fixture
    def asked(self, engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many questions were answered in each batch; the second of a batch does not end."""
        use(engine, monkeypatch)
        counts: list[int] = []

        def given(_: object, prompts: Sequence[object], tokens: int) -> list[tuple[Tensor, None]]:
            counts.append(len(prompts))
            answers = [self.ENDED, (ANSWER * 2)[:tokens], self.ENDED][: len(prompts)]
            return [(torch.tensor(answer), None) for answer in answers]

        monkeypatch.setattr(stock_models, "full_answers", given)
        return counts

    def test_are_those_that_ended_to_the_prompts_that_measurements_use(
        self, engine: BlockAttentionEngine, asked: list[int], data: Path, tmp_path: Path
    ) -> None:
        output = tmp_path / "answers.jsonl"
        run("answers", "--data", data, "--output", output, *SMALL[2:])
        lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        assert asked == [3]
        assert len(lines) == 2
        samples = {sample.id: sample.with_passages(3) for sample in read_samples(data)}
        tokenizer = engine.model.tokenizer
        for line in lines:
            prompt = make_prompt(engine, CHAT, samples[line["id"]], "block")
            ids = tokenizer.prompt_ids(prompt)
            encoded = SampleEncoder(tokenizer.tokenizer).encode_record(line)
            assert encoded.input_ids == [*ids.flat, *self.ENDED]
            assert encoded.block_lengths[:-1] == [*map(len, ids.context)]

    def test_are_not_asked_for_again(self, asked: list[int], data: Path, tmp_path: Path) -> None:
        common = ["answers", "--data", data, "--output", tmp_path / "answers.jsonl", *SMALL[2:]]
        run(*common, "--limit", 1)
        run(*common)
        run(*common)
        assert asked == [1, 2, 1]
        told = run(*common, "--max-new-tokens", 5, refused=True)
        assert "name another --output" in told
