"""The quality benchmark: questions, rows and diagnosis."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / "benchmarks" / one) for one in ("", "quality")]

import sets
from choices import Candidate, Choice, choices_table, compare, partly_recomputed
from diagnosis import CHANGES, NOTHING, diagnose, joined
from finetuning import TunedAnswerer, write_samples
from precision import TYPES, answers, engines_of, precision_table
from records import measure, read
from rows import Answerer, Record
from system_prompts import FORMS, ROWS, SystemRecord, system_table
from system_prompts import answers as answers_of_systems
from table import summary

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.check.model import placed_context
from blockattn_rag.lab.evaluation.datasets import EvaluationPassage, EvaluationSample
from blockattn_rag.lab.evaluation.metrics import contains_answer
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import CHAT

MADE = {"facts": 90, "comparisons": 38, "pairs": 80, "order": 90}


@pytest.mark.parametrize("name", MADE)
def test_every_answer_is_in_the_passages(name: str) -> None:
    items = getattr(sets, name)()
    assert len(items) == len({item.id for item in items}) == MADE[name]
    for item in items:
        shown = " ".join(f"{passage.title} {passage.text}" for passage in item.passages)
        assert len({passage.title for passage in item.passages}) == 6
        assert item.is_right(" ".join(group[0] for group in item.needed))
        assert all(contains_answer(shown, group) for group in item.needed)
        assert item.rival not in ("", *item.needed[0]) or name != "comparisons"


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return BlockAttentionEngine.from_pretrained("bundled", store="memory:", dtype="float32")


def test_precision_compares_int8_with_the_models_dtype(engine: BlockAttentionEngine) -> None:
    item = sets.facts()[0]
    found = [*answers(engines_of(engine.model, "head:4"), CHAT, 6, item, TYPES)]
    own, small = found
    assert [one.row for one in found] == ["model", "int8"]
    assert own.kl == pytest.approx(0, abs=1e-6)
    assert own.agreement == 1
    assert 1e-6 < small.kl < 0.1
    line = precision_table([replace(own, right=1), replace(small, right=0)]).splitlines()[2]
    assert line.startswith("| facts, 1 | 1 | 0 | -100.0% (-100.0% to -100.0%) | 1 | 0 |")


def test_candidates_give_the_results_of_the_corresponding_recipes(
    engine: BlockAttentionEngine,
) -> None:
    item = next(one for one in sets.facts() if sum(one.id.encode()) % 3)  # uses the standard prompt
    names = ["none", "none, 10 %", "none, 10 % by all layers", "head:4", "short head"]
    names += ["none, 10 %, half of them first tokens", "the prompt's head, 10 %"]
    names += ["head, 10 %, selected twice", "head, 10 % by full mode's attention"]
    found = {one.candidate: one for one in compare(engine, CHAT, 6, item, names)}
    assert list(found) == names
    recipes = {"none": "none", "none, 10 %": "recompute:0.1", "head:4": "fast"}
    resolved = {name: Recipe.of_text(text) for name, text in recipes.items()}
    answerer = Answerer(engine, CHAT, resolved, max_new_tokens=6)  # type: ignore[arg-type]
    for one in answerer.answer(item, list(recipes)):
        assert found[one.row].kl == pytest.approx(one.kl, rel=1e-3, abs=1e-5)
    blocks = engine.model.tokenizer.prompt_ids(answerer.prompt(item)).context
    tenth = round(0.1 * sum(map(len, blocks[1:])))
    assert {one.tokens for one in found.values()} == {0, tenth}
    assert found["none"].tokens == 0
    assert len({one.kl for one in found.values()}) == len(names)
    table = choices_table([*found.values()])
    assert table.count("| - |") == 1


@pytest.mark.parametrize(
    ("recomputed", "changed"), [((0, 1), [1, 2, 3]), ((0, 0.5), [1]), ((0.25, 0.75), [2])]
)
def test_tokens_are_recomputed_in_some_layers(
    engine: BlockAttentionEngine, recomputed: tuple[float, float], changed: list[int]
) -> None:
    """The first of these layers gets block mode's hidden states, so it computes the same keys."""
    model, blocks = engine.model, [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    context = placed_context(model, blocks)
    candidate = Candidate("none", 1, recomputed=recomputed)
    (block,) = partly_recomputed(model, context, blocks, (), [3, 4, 6, 8], candidate).blocks
    own = joined(model, context, block.kv)
    differs = [
        not torch.allclose(ours, theirs, atol=1e-5)
        for ours, theirs in zip(block.kv.keys, own.keys, strict=True)
    ]
    assert [layer for layer, is_changed in enumerate(differs) if is_changed] == changed


def test_tuning_questions_are_not_part_of_reported_results(tmp_path: Path) -> None:
    passages = [{"title": f"{n}", "text": "t", "gold": not n} for n in range(10)]
    samples = [
        {"id": f"q{n}", "question": "?", "answers": ["t"], "passages": passages} for n in range(20)
    ]
    path = tmp_path / "nq.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in samples))
    chosen = sets.tuning(path)
    asked = [one.id for one in chosen if one.set.startswith("nq")]
    assert len(asked) == len({*asked}) == 20
    reported = sets.mixed([sets.facts(), sets.comparisons(), sets.pairs(), sets.order()])[:136]
    assert not {(one.set, one.id) for one in chosen} & {(one.set, one.id) for one in reported}


@pytest.mark.parametrize("model", ["smollm2", "qwen"])
def test_the_committed_table_shows_the_committed_choices(model: str) -> None:
    path = Path(__file__).parents[1] / "benchmarks/results/quality/choices" / f"{model}.csv"
    assert choices_table([*read(path, Choice)]) == path.with_suffix(".md").read_text("utf-8")


def test_a_diagnosis_starts_at_the_recipe_and_ends_at_full_mode(
    engine: BlockAttentionEngine,
) -> None:
    recipes = {"block": engine.recipe}
    answerer = Answerer(engine, CHAT, recipes, max_new_tokens=6)
    item = sets.facts()[0]
    found = {one.change: one for one in diagnose(answerer, engine.recipe, item)}
    assert list(found) == list(CHANGES)
    block = next(one for one in answerer.answer(item, answerer.rows) if one.row == "block")
    assert found[NOTHING].kl == pytest.approx(block.kl, rel=1e-3, abs=1e-5)
    assert found[NOTHING].kl > 0.01
    assert found["everything"].kl == pytest.approx(0, abs=1e-5)
    assert found["everything"].agreement == 1
    assert 0 <= found[NOTHING].attended < len(item.passages)
    assert found["keys"].kl != found["values"].kl


@pytest.fixture(scope="module")
def changed() -> BlockAttentionEngine:
    """An engine over a copy of the model with one changed weight matrix."""
    model = BlockModel.from_pretrained("bundled", dtype="float32")
    with torch.no_grad():
        model.hf_model.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(0.5)
    again = BlockModel(model.hf_model, model.tokenizer, name="bundled")
    return BlockAttentionEngine(again, "memory:")


def test_tuned_models_answer_in_both_modes(
    engine: BlockAttentionEngine, changed: BlockAttentionEngine
) -> None:
    answerer = TunedAnswerer(engine, {"same": engine, "changed": changed}, CHAT, 12)
    item = sets.facts()[0]
    found = {one.row: one for one in answerer.answer(item, answerer.rows)}
    assert [*found] == ["full", "recipe"] + [
        f"{name}{mode}" for name in ("same", "changed") for mode in ("", ", full mode")
    ]
    assert found["same"].output == found["recipe"].output
    assert found["same, full mode"].output == found["full"].output
    assert found["changed"].output != found["same"].output
    assert found["changed, full mode"].output != found["full"].output
    assert found["full"].computed_tokens == found["full"].prompt_tokens
    assert found["same"].computed_tokens < found["same"].prompt_tokens
    assert found["same"].ttft_s > 0
    (added,) = answerer.answer(item, ["same"])
    assert isnan(added.ttft_s)  # Full mode was timed in another run.


def test_a_run_adds_missing_rows_and_refuses_unknown_rows(
    engine: BlockAttentionEngine, tmp_path: Path
) -> None:
    recipes = {"block": engine.recipe, "sink": Recipe("head:4"), "recompute": Recipe(recompute=0.1)}
    answerer = Answerer(engine, CHAT, recipes, max_new_tokens=2)
    path, items, rows = tmp_path / "model.csv", sets.facts()[:1], answerer.rows
    some = [rows[1], rows[3]]
    measure(path, Record, items, answerer.answer, some, 1)
    assert [one.name for one in read(path, Record)] == some
    for _ in range(2):  # nothing is missing the second time
        measure(path, Record, items, answerer.answer, rows, 1)
    found = [*read(path, Record)]
    assert [one.name for one in found] == [*some, rows[0], rows[2], rows[4]]
    assert isnan(found[0].ttft_s)  # full mode was timed in another run
    assert found[2].ttft_s > 0
    with pytest.raises(SystemExit, match=r"has \['block'\], this run"):
        measure(path, Record, items, answerer.answer, [one for one in rows if one != "block"], 1)


def test_training_contexts_answer_several_questions(tmp_path: Path) -> None:
    golds = [EvaluationPassage(f"title {i}", f"text {i}", gold=True) for i in range(8)]
    questions = [
        EvaluationSample(
            str(i),
            f"question {i}",
            (f"answer {i}", "another"),
            tuple(replace(one, gold=one == gold) for one in golds),
        )
        for i, gold in enumerate(golds)
    ]
    write_samples(questions, path := tmp_path / "train.jsonl", 10)
    contexts = [json.loads(line) for line in path.read_text().splitlines()]
    firsts = [context["turns"][0]["question"] for context in contexts]
    assert sorted(firsts[:8]) == [one.question for one in questions]  # each once per epoch
    for context in contexts:
        titles = [passage["title"] for passage in context["passages"]]
        assert 3 <= len({*titles}) == len(titles) <= 6
        asked = [turn["question"] for turn in context["turns"]]
        assert len(asked) == min(4, len(titles))
        assert {one.replace("question", "title") for one in asked} <= {*titles}
        answered = [turn["answer"] for turn in context["turns"]]
        assert answered == [one.replace("question", "answer") for one in asked]
    assert len({len(context["passages"]) for context in contexts}) > 1
    write_samples(questions, again := tmp_path / "again.jsonl", 10)
    assert again.read_text() == path.read_text()


def test_the_summary_has_percentages_and_fills_in_missing_times() -> None:
    def record(row: str, question: int, right: int, ttft_s: float) -> Record:
        return Record("facts", str(question), row, right, 0.0, 0.0, 1.0, 1, 10, ttft_s, "")

    nan = float("nan")
    records = [record("full", one, 1, 8.0) for one in range(4)]
    records += [record("block", one, int(one == 0), 1.0) for one in range(4)]
    records += [record("head, 5 % recomputed", one, int(one < 2), nan) for one in range(4)]
    records += [record("head, 10 % recomputed", 0, 1, nan)]
    again = [record("full", 0, 1, 6.0), record("head, 5 % recomputed", 0, 1, 2.0)]
    text = summary(records, again)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert rows[0] == ["full mode", "100.0 %", "", "", ""]
    _, right, change, kept, sooner = rows[1]
    assert (right, kept, sooner) == ("25.0 %", "1 of 4", "8.0")
    assert change.startswith("-75.0 (")
    assert rows[2][3:] == ["2 of 4", "3.0 (1 questions)"]
    assert rows[3][0] == '10 % recomputed (`"head+recompute:0.1"`) (1 questions)'
    assert rows[3][3:] == ["1 of 1", "not measured"]


@pytest.mark.parametrize("model", ["smollm2", "qwen", "gemma"])
def test_the_committed_summaries_show_the_committed_answers(model: str) -> None:
    results = Path(__file__).parents[1] / "benchmarks" / "results" / "quality"
    records = [*read(results / f"{model}.csv", Record)]
    repeated = [*read(results / "repeated" / f"{model}.csv", Record)]
    expected = (results / "summary" / f"{model}.md").read_text(encoding="utf-8")
    assert summary(records, repeated) == expected


def test_a_collection_is_reused_under_another_system_prompt(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = sets.facts()[0]

    def reused() -> dict[str, SystemRecord]:
        return {one.row: one for one in answers_of_systems(engine, 6, item, ROWS)}

    records = reused()
    assert [*records] == ROWS
    assert [(one.hits, one.blocks) for one in records.values()] == [(0, 0), (6, 6)] * 2
    scored = [replace(one, right=int(row.startswith("other"))) for row, one in records.items()]
    lines = system_table(scored).splitlines()[2:]
    assert lines[0] == "| ingested | 6 of 6 | 0 of 1 | 0 | +0.0% (+0.0% to +0.0%) |"
    assert lines[1] == "| other | 6 of 6 | 1 of 1 | 1 | +0.0% (+0.0% to +0.0%) |"

    monkeypatch.setitem(FORMS, "other", replace(CHAT, titled="Passage {title}: {text}"))
    assert reused()["other, block"].hits == 0
