"""The attention by which passages are promoted, on any number of ranks and in any chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from blockattn_rag import Recipe
from blockattn_rag.check.checks import placed_context
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.server.profile import profile_of
from blockattn_rag.server.protocol import BlockPlan
from tests.recipes import recipe_of
from tests_vllm.engines import Engine
from tests_vllm.reference import TELLING, Case, Reference

PIPELINE = {"pipeline_parallel_size": 2, "worker_extension_cls": "tests_vllm.test_ranks.Rehearsed"}
ENGINES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "few pages": {"max_num_batched_tokens": 192, "num_gpu_blocks_override": 22},
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
    said = engine.ask_all(asked, max_tokens=2)
    for one, shares in zip(said, wanted, strict=True):
        assert one.blocks is not None
        assert one.blocks["attention"] == pytest.approx(shares, abs=1e-5)
    if "few pages" in request.node.name:
        assert engine.counted("vllm:num_preemptions") > 0
