"""Recipes of the LLM and of single calls, and how they are reported."""

from __future__ import annotations

import inspect
from typing import Any

from blockattn_rag import Recipe
from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVTransform
from blockattn_rag.llama_index.messages import BlockReuseEvent
from blockattn_rag.llama_index.nodes import canonical_text
from blockattn_rag.prompts.markers import wrap
from tests.llama_index.conftest import RecordingEngine, passages
from tests.recipes import recipe_of

MARKED = f"Head. {''.join(wrap(canonical_text(node)) for node in passages(3))}Q"


def test_the_constructor_has_few_arguments() -> None:
    _, *own, rest = inspect.signature(BlockAttentionLLM.__init__).parameters
    assert (len(own), rest) == (12, "llm_fields")


def test_promoted_tokens_count_as_computed(llm: BlockAttentionLLM) -> None:
    promoting = Recipe(promote=3)
    llm.complete(MARKED)
    shown = llm.complete(MARKED, recipe=promoting).raw["usage"]
    assert shown["computed_tokens"] > 40
    prompt = llm.to_prompt(MARKED, formatted=False)
    stats = llm.engine.generate(prompt, mode="full", max_new_tokens=1).stats
    event = BlockReuseEvent(stats=stats).model_dump()
    assert event["computed_tokens"] == shown["computed_tokens"] + shown["reused_tokens"]


def test_a_cached_ingestion_ends_with_its_recipe(block_model: Any) -> None:
    def cached(recipe: Any) -> dict[str, Any]:
        return BlockKVTransform(engine=RecordingEngine(block_model, recipe=recipe)).to_dict()

    recipe = recipe_of(block_model)
    told = [cached(one)["encoding"] for one in ("none", "bos", recipe, recipe)]
    assert told[2] == told[3]
    assert told[0] != told[1] != told[2]
    promoting = recipe_of(block_model, promote=1)
    assert cached(promoting)["encoding"] == told[2]  # promotion does not change the encoding
