"""The attention by which passages are promoted, on any number of ranks and in any chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag import Recipe
from blockattn_rag.check.model import placed_context
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.server.profile import profile_of
from blockattn_rag.server.protocol import BlockPlan
from blockattn_rag.server.vllm import attention
from blockattn_rag.server.vllm.attention import AttentionMeter, block_shares
from blockattn_rag.server.vllm.scheduler import Score
from tests.recipes import recipe_of
from tests_vllm.engines import Engine
from tests_vllm.reference import TELLING, Case, Reference

PIPELINE = {"pipeline_parallel_size": 2, "worker_extension_cls": "tests_vllm.test_ranks.Rehearsed"}
ENGINES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "few pages": {
        "max_num_batched_tokens": 192,
        "num_gpu_blocks_override": 22,
        "max_model_len": 1536,
        "enable_prefix_caching": False,
    },
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": PIPELINE,
}


@pytest.fixture(scope="module")
def recipe(reference: Reference) -> Recipe:
    return recipe_of(reference.model, size=0.05, promote=1)


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, reference: Reference, recipe: Recipe
) -> Iterator[Engine]:
    folder = reference.folder / "promotion"
    recipe.save(folder / "recipe")
    profile_of(reference.model, recipe).write(folder / "profile.json")
    files = {"recipe": str(folder / "recipe"), "profile": str(folder / "profile.json")}
    options = reference.options(read_only=request.param == "two stages", **files)
    with pytest.MonkeyPatch.context() as environment:
        if request.param.startswith("two"):
            environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        engine = Engine(options, **ENGINES[request.param])
        if request.param == "two stages":
            engine.llm.collective_rpc("rehearse")
        yield engine
        engine.close()


def expected(reference: Reference, recipe: Recipe, case: Case) -> list[float]:
    """Attention as the local engine measures it."""
    reference.answer(case, recipe=recipe)  # stores the blocks
    sink = sink_ids(recipe.sink, reference.model.tokenizer)
    context = placed_context(reference.model, case.blocks, sink, recipe)
    return reference.model.attention_to_blocks(context, case.ids[context.num_tokens :])


def test_attention_is_the_local_engine_s(
    request: pytest.FixtureRequest, reference: Reference, engine: Engine, recipe: Recipe
) -> None:
    cases = [reference.case(number, records=2) for number in TELLING[:4]]
    long = [case.texts[-1] + " Think of towers, lakes and companies." * 40 for case in cases]
    cases = [reference.case_of((*c.texts[:-1], q)) for c, q in zip(cases, long, strict=True)]
    wanted = [expected(reference, recipe, case) for case in cases]
    plans = [BlockPlan("score", case.lengths, keep=case.keep).to_dict() for case in cases]
    asked = [(case.ids, plan) for case, plan in zip(cases, plans, strict=True)]
    has_few = "few pages" in request.node.name
    said = engine.ask_all(asked, max_tokens=200 if has_few else 2)
    for one, shares in zip(said, wanted, strict=True):
        assert one.blocks is not None
        assert one.blocks["attention"] == pytest.approx(shares, abs=1e-5)
    if has_few:
        assert engine.counted("vllm:num_preemptions") > 0


PAGE = 4
LENGTHS, PROMPT_TOKENS = (5, 7), 21


class _Pages:
    """Pages of a layer, in which tokens lie where requests put them."""

    def __init__(self, slots: int) -> None:
        self.keys = torch.randn(2, slots, 8)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys[:, slots], self.keys[:, slots]


def slots_of(pages: Sequence[int], tokens: int) -> Tensor:
    starts = PAGE * torch.tensor(pages)
    return (starts[:, None] + torch.arange(PAGE)).flatten()[:tokens]


def test_a_token_that_is_computed_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [
        SimpleNamespace(
            layer_name=str(index), impl=SimpleNamespace(scale=0.5, forward=lambda _, query: query)
        )
        for index in range(2)
    ]
    pages: list[Any] = [_Pages(100), _Pages(100)]
    meter = AttentionMeter(layers, pages, slots_of)
    queries = torch.randn(2, PROMPT_TOKENS, 4, 8)  # of each layer and token
    old, new = [3, 1, 4, 0, 5, 9], [2, 6, 8, 7, 10, 11]
    for one in pages:
        one.keys[:, slots_of(new, 24)] = one.keys[:, slots_of(old, 24)]
    final_tokens = PROMPT_TOKENS - sum(LENGTHS)
    said = []
    for used, start, stop in ((old, 12, 16), (new, 12, 18), (new, 18, 21)):
        meter.begin([Score("r", LENGTHS, final_tokens, used, start, stop)])
        # Tokens of another request come first.
        slots = torch.cat([torch.tensor([60, 61, 62]), slots_of(used, stop)[start:]])
        context = SimpleNamespace(slot_mapping={"0": slots, "1": slots})
        monkeypatch.setattr(attention, "get_forward_context", lambda context=context: context)
        for layer, of_layer in zip(layers, queries, strict=True):
            layer.impl.forward(layer, torch.cat([torch.randn(3, 4, 8), of_layer[start:stop]]))
        said.append(meter.end([]))
    assert said[:2] == [{}, {}]
    wanted = sum(
        block_shares(of_layer[12:], one.keys[:, slots_of(old, 12)], LENGTHS, 0.5)
        for of_layer, one in zip(queries, pages, strict=True)
    )
    assert said[2]["r"] == pytest.approx(wanted.tolist(), abs=1e-5)  # type: ignore[union-attr]
    assert sum(said[2]["r"]) == pytest.approx(2 * final_tokens)
