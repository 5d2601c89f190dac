"""The oracle in cases with known results, and compared with a direct evaluation of the model."""

from __future__ import annotations

import pytest
import torch

from blockattn_rag.check.oracle import RecipeOracle, oracle_generate, oracle_logits
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.prompts.blocks import BlockPrompt
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import correction_of, recipe_of

FIRST, ONE, OTHER, FINAL = [256, 3, 4, 5], [7, 8, 9, 10, 11], [20, 21], [40, 41, 42]
PROMPT = [FIRST, ONE, OTHER, FINAL]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(tiny_model("llama"), tiny_tokenizer())


def test_an_adapter_of_zeros_has_no_effect(model: BlockModel) -> None:
    adapter, layouts = correction_of(model, size=0), model.profile.layouts
    expected = oracle_logits(model.hf_model, PROMPT)
    found = oracle_logits(model.hf_model, PROMPT, adapter=adapter, layouts=layouts)
    assert relative_error(found, expected) <= LOGITS[torch.float32]
    assert not torch.equal(found, expected)  # computed in a different way


def test_an_adapter_only_affects_attention_to_passages_while_it_is_applied(
    model: BlockModel,
) -> None:
    adapter, layouts = correction_of(model), model.profile.layouts
    plain = oracle_logits(model.hf_model, PROMPT)
    before = model.config._attn_implementation
    found = oracle_logits(model.hf_model, PROMPT, adapter=adapter, layouts=layouts)
    assert relative_error(found, plain) > 1e-2
    assert model.config._attn_implementation == before
    assert torch.equal(oracle_logits(model.hf_model, PROMPT), plain)
    for prompt in ([FINAL], [FIRST, FINAL]):
        plain = oracle_logits(model.hf_model, prompt)
        found = oracle_logits(model.hf_model, prompt, adapter=adapter, layouts=layouts)
        assert relative_error(found, plain) <= LOGITS[torch.float32]


def test_composite_positions_start_each_block_at_0() -> None:
    """With composite positions, the order of passages does not change their keys."""
    model = tiny_model("llama")
    one, other = ([FIRST, *blocks, FINAL] for blocks in ([ONE, OTHER], [OTHER, ONE]))
    found = oracle_logits(model, one, positions="composite")
    swapped = oracle_logits(model, other, positions="composite")
    assert relative_error(found, swapped) <= LOGITS[torch.float32]
    assert relative_error(oracle_logits(model, one), oracle_logits(model, other)) > 1e-2


def test_greedy_tokens_are_those_of_the_recipes_logits(model: BlockModel) -> None:
    prompt = BlockPrompt.from_texts(["first", "Halden is tall.", "Ferries go.", "How tall?"])
    oracle = RecipeOracle(model, prompt, recipe_of(model, size=0.3, promote=1))
    found = oracle.generate(4)
    assert found != RecipeOracle(model, prompt, Recipe()).generate(4)
    with pytest.raises(ValueError, match=r"Unsupported recipe recompute:0\.1"):
        RecipeOracle(model, prompt, Recipe(recompute=0.1))
    for number, token in enumerate(found):
        assert token == int(oracle.logits(found[:number])[-1].argmax())
    assert oracle.logits(found)[:-1].argmax(-1).tolist() == found


def test_the_default_recipe_is_plain_block_mode(model: BlockModel) -> None:
    prompt = BlockPrompt.from_texts(["first", "Halden is tall.", "How tall?"])
    ids = model.tokenizer.prompt_ids(prompt)
    expected = oracle_generate(model.hf_model, [*ids.context, ids.final], 4)
    assert RecipeOracle(model, prompt, Recipe()).generate(4)[:4] == expected
