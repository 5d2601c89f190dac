"""The diagnosis: what is swapped is what is said, its ends are block mode and the floor."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import DataError
from blockattn_rag.evaluation import (
    EvaluationSample,
    FidelityReport,
    diagnose,
    measure_fidelity,
    plot_diagnosis,
    read_samples,
)
from blockattn_rag.evaluation.diagnosis import ContextStates, Part, parts_of
from blockattn_rag.evaluation.run import make_prompt
from blockattn_rag.kv.context import place
from blockattn_rag.model import BlockModel
from blockattn_rag.model.probe import layer_states
from blockattn_rag.prompts.formats import CHAT
from tests.evaluation.samples import record, write_jsonl
from tests.models import shared_tiny_llama, tiny_model, tiny_tokenizer

NEW = 4
SINKS = ["none", "head:4", "first-block"]


def make_engine(family: str = "llama") -> BlockAttentionEngine:
    windows = {"sliding_window": 96} if family == "mistral" else {}
    tiny = tiny_model(family, **windows) if windows else copy.deepcopy(shared_tiny_llama())
    model = BlockModel(tiny, tiny_tokenizer())
    model.config.block_attention = {"tuned": True}  # no warning
    return BlockAttentionEngine(model)


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return make_engine()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[EvaluationSample]:
    data = write_jsonl(tmp_path_factory.mktemp("data") / "d.jsonl", map(record, range(1, 3)))
    return read_samples(data)


def states_of(
    engine: BlockAttentionEngine, sample: EvaluationSample, sink: str = "none"
) -> ContextStates:
    ids = engine.model.tokenizer.prompt_ids(make_prompt(engine, CHAT, sample, "full"))
    return ContextStates(engine.model, ids.context, sink)


def by_hand(engine: BlockAttentionEngine, sample: EvaluationSample) -> tuple[list[int], Tensor]:
    """Lengths of the context blocks, and full mode's keys and values ``[2, layers, heads, n, d]``,
    from the model's own forward."""
    context, _ = engine.model.tokenizer.prompt_ids(make_prompt(engine, CHAT, sample, "full"))
    cache = DynamicCache()
    with torch.inference_mode():
        ids = torch.tensor([[token for block in context for token in block]])
        engine.model.hf_model(input_ids=ids, past_key_values=cache)
    states = [torch.stack([keys[0], values[0]]) for keys, values in layer_states(cache)]
    return [len(block) for block in context], torch.stack(states, dim=1)


def joined(states: ContextStates, part: Part) -> Tensor:
    kv = states.swapped(part)
    return torch.stack([torch.stack(kv.keys), torch.stack(kv.values)])


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("sink", SINKS)
def test_nothing_swapped_is_block_mode_and_all_swapped_is_the_floor(
    samples: list[EvaluationSample], family: str, sink: str
) -> None:
    engine = make_engine(family)
    found = diagnose(engine, samples, sink=sink, max_new_tokens=NEW)
    expected = measure_fidelity(engine, samples, [f"sink={sink}"], max_new_tokens=NEW)
    for name, mode in (("block", f"sink={sink}"), ("floor", "floor")):
        pairs = zip(
            [r for r in found.records if r.mode == name],
            [r for r in expected.records if r.mode == mode],
            strict=True,
        )
        for ours, theirs in pairs:
            # Both are exact to 1e-4 in the logits (the design's law), and KL is quadratic in their
            # error, so that its root moves by no more.
            assert abs(ours.kl**0.5 - theirs.kl**0.5) < 1e-4
            assert (ours.id, ours.agreement, ours.tokens) == (
                theirs.id,
                theirs.agreement,
                theirs.tokens,
            )
    assert found["floor"].kl.high < 1e-8
    assert found["block"].kl.low > 1e3 * found["floor"].kl.high
    assert found["block"].recovery is found["floor"].recovery is None


@pytest.mark.parametrize("sink", SINKS)
def test_with_nothing_swapped_the_logits_are_those_of_the_engine(
    engine: BlockAttentionEngine, samples: list[EvaluationSample], sink: str
) -> None:
    prompt, answer = make_prompt(engine, CHAT, samples[0], "full"), [65, 66, 67]
    states = states_of(engine, samples[0], sink)
    cache = engine.model.cache_for(place([states.swapped(parts_of(3)["block"])]))
    final = engine.model.tokenizer.prompt_ids(prompt).final
    found = engine.model.answer_logits(states.token_ids, final, answer, cache)
    expected = engine.answer_logits(prompt, answer, sink=sink, assembly="copy")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_each_part_holds_the_models_own_states_where_it_says(
    engine: BlockAttentionEngine, samples: list[EvaluationSample]
) -> None:
    lengths, full = by_hand(engine, samples[0])
    assert min(lengths) > 4
    states, parts = states_of(engine, samples[0]), parts_of(3)
    block = joined(states, parts["block"])
    starts = [sum(lengths[:i]) for i in range(len(lengths))]

    def first_of(count: int) -> Tensor:
        firsts = torch.zeros(sum(lengths), dtype=torch.bool)
        for start, length in zip(starts, lengths, strict=True):
            firsts[start : start + min(count, length)] = True
        return firsts

    def only_layer_1(swapped: Tensor, rest: Tensor) -> Tensor:
        return torch.cat([rest[:1], swapped[1:2], rest[2:]])

    first_16 = torch.where(first_of(16)[:, None], full, block)
    expected = {
        "floor": full,
        "keys": torch.stack([full[0], block[1]]),
        "values": torch.stack([block[0], full[1]]),
        "first-4": torch.where(first_of(4)[:, None], full, block),
        "layers<2": torch.cat([full[:, :2], block[:, 2:]], dim=1),
        "layers>=2": torch.cat([block[:, :2], full[:, 2:]], dim=1),
        "keys 1-1": torch.stack([only_layer_1(full[0], block[0]), block[1]]),
        "values 1-1": torch.stack([block[0], only_layer_1(full[1], block[1])]),
        "first-16 2-2": torch.cat([block[:, :2], first_16[:, 2:]], dim=1),
    }
    for name, right in expected.items():
        # Encoding is batched otherwise than here: equal but for rounding.
        torch.testing.assert_close(joined(states, parts[name]), right, rtol=1e-4, atol=1e-5)
        assert name == "floor" or (right - full).abs().max() > 0.1


def test_swapping_leaves_what_is_swapped_as_it_was(
    engine: BlockAttentionEngine, samples: list[EvaluationSample]
) -> None:
    states, model = states_of(engine, samples[0]), engine.model
    before = [joined(states, part) for part in parts_of(3).values()]
    for part in parts_of(3).values():
        cache = model.cache_for(place([states.swapped(part)]))
        model.answer_logits(states.token_ids, [65], [66, 67], cache)
    for part, expected in zip(parts_of(3).values(), before, strict=True):
        assert torch.equal(joined(states, part), expected)


def test_the_first_block_is_alike_in_both(
    engine: BlockAttentionEngine, samples: list[EvaluationSample]
) -> None:
    lengths, full = by_hand(engine, samples[0])
    block = joined(states_of(engine, samples[0]), parts_of(3)["block"])
    difference = (block - full).abs().amax(dim=(0, 1, 2, 4))
    assert difference[: lengths[0]].max() < 1e-4
    assert difference[lengths[0] :].max() > 0.1


def test_cuts_are_within_the_layers_and_distinct() -> None:
    assert [n for n in parts_of(1) if n.startswith("layers")] == []
    assert [n for n in parts_of(3) if n.startswith("layers<")] == ["layers<1", "layers<2"]
    of_30 = parts_of(30)
    assert [n for n in of_30 if n.startswith("layers>")] == [
        f"layers>={cut}" for cut in (5, 10, 15, 20, 25)
    ]
    assert (of_30["layers<10"].layers, of_30["layers>=10"].layers) == (range(10), range(10, 30))


def test_a_stopped_diagnosis_goes_on_where_it_was(
    engine: BlockAttentionEngine, samples: list[EvaluationSample], tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diagnose(engine, samples, max_new_tokens=NEW, records_path=path, on_progress=stop)
    kept = path.read_text("utf-8")
    assert len(kept.splitlines()) == 1 + len(parts_of(3))
    resumed = diagnose(engine, samples, max_new_tokens=NEW, records_path=path)
    assert path.read_text("utf-8").startswith(kept)
    assert resumed.records == diagnose(engine, samples, max_new_tokens=NEW).records
    with pytest.raises(DataError, match="other settings"):
        diagnose(engine, samples, max_new_tokens=NEW, records_path=path, sink="bos")


def test_what_cannot_be_diagnosed_is_refused(
    engine: BlockAttentionEngine, samples: list[EvaluationSample]
) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        diagnose(engine, [])
    with pytest.raises(ValueError, match="sink must be"):
        diagnose(engine, samples, sink="tail")
    with pytest.raises(ValueError, match="sample 'q1' has no passages"):
        diagnose(engine, [replace(samples[0], passages=()), samples[1]])


@pytest.fixture(scope="module")
def report(engine: BlockAttentionEngine, samples: list[EvaluationSample]) -> FidelityReport:
    return diagnose(engine, samples, max_new_tokens=NEW)


def test_a_plot_shows_every_part_and_the_layers(report: FidelityReport, tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    plot_diagnosis(report, file)
    drawn = file.read_text("utf-8")
    figures = {"keys": "keys", "first-16": "first-16", "floor": "all (floor)"}
    texts = [f"{text}: {report[name].kl.mean:.4f}" for name, text in figures.items()]
    for text in (*texts, "layer (of 3)", "of the layers before"):
        assert f"<!-- {text} -->" in drawn
    assert "<!-- layers" not in drawn
