"""Models with shared, latent and state layers match the oracle on every path."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockattn_rag.check.oracle import RecipeOracle
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import states
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.store import DirectoryStore, MemoryStore
from tests.model.families import KINDS
from tests.model.miniatures import model_of_kinds, new_model
from tests.recipes import recipe_of

EXACT = LOGITS[torch.float32]
HEAD, A, ONE, B = "You answer.", "Halden Tower is 214 metres tall, they say.", "x", "Built in 1931."
QUESTION = "How tall is it?"
NEW = 5
STOCK = Recipe("head:4", promote=1)
RECIPES = [Recipe(), STOCK, Recipe("bos", promote=2, positions="composite")]
CONTEXTS: list[list[str]] = [[], [HEAD], [ONE, B], [HEAD, A, A, ONE], [HEAD, B, ONE, A]]

RECOMPUTING = [kind for kind in KINDS if not re.search("state|latent|positions", kind)]
kinds = pytest.mark.parametrize("kind", KINDS)


def engine_of(kind: str, store: Any = None, **settings: Any) -> BlockAttentionEngine:
    settings = {"recipe": STOCK, **settings}
    return BlockAttentionEngine(model_of_kinds(kind), store or MemoryStore(1 << 28), **settings)


def prompt_of(texts: list[str]) -> BlockPrompt:
    return BlockPrompt.from_texts([*texts, QUESTION])


def oracle_of(kind: str, texts: list[str], recipe: Recipe = STOCK) -> RecipeOracle:
    return RecipeOracle(model_of_kinds(kind), prompt_of(texts), recipe)


def assemblies(engine: BlockAttentionEngine) -> list[str]:
    return ["relay", "copy"] if engine.model.supports_relay else ["copy"]


@kinds
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_logits_match_the_oracle(kind: str, recipe: Recipe) -> None:
    if kind == "scaled queries" and recipe.positions == "composite":
        # The oracle gives sinks negative positions here, for which the scale is NaN.
        recipe = replace(recipe, sink="none")
    engine = engine_of(kind, recipe=recipe)
    for texts in CONTEXTS:
        expected = oracle_of(kind, texts, recipe).logits([5])
        for assembly in assemblies(engine):
            one = engine_of(kind, engine.store, recipe=recipe, assembly=assembly)
            found = one.answer_logits(prompt_of(texts), [5, 6])
            assert relative_error(found.float(), expected) <= EXACT, (texts, assembly)


@kinds
def test_answers_streams_and_batches_match_the_oracle(kind: str) -> None:
    engine = engine_of(kind)
    prompts = [prompt_of(texts) for texts in ([HEAD, A, B], [HEAD, B, ONE, A], [])]
    expected = [oracle_of(kind, [b.text for b in p.context]).generate(NEW) for p in prompts]
    assert [engine.generate(p, max_new_tokens=NEW).token_ids for p in prompts] == expected
    together = engine.generate_batch(prompts, max_new_tokens=NEW)
    assert [one.token_ids for one in together] == expected
    *chunks, last = engine.stream(prompts[0], max_new_tokens=NEW)
    assert last.generation is not None
    assert last.generation.token_ids == expected[0]
    assert "".join(chunk.text for chunk in chunks) == last.generation.text


@kinds
def test_a_later_turn_gives_the_answer_of_a_new_conversation(kind: str) -> None:
    engine = engine_of(kind)
    first = engine.generate(prompt_of([HEAD, A, B]), max_new_tokens=NEW)
    longer = BlockPrompt(prompt_of([HEAD, A, B]).context, f"{QUESTION}{first.text} And wide?")
    again = engine.generate(longer, max_new_tokens=NEW)
    fresh = engine_of(kind, engine.store, resident_bytes=0).generate(longer, max_new_tokens=NEW)
    assert again.token_ids == fresh.token_ids
    is_reused = again.stats.computed_tokens < fresh.stats.computed_tokens
    assert is_reused == (not engine.model.profile.has_states)


@kinds
def test_beams_over_one_block_equal_full_mode(kind: str) -> None:
    engine = engine_of(kind, recipe="none")
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": NEW}
    full = engine.generate(prompt_of([HEAD]), mode="full", **options)
    assert engine.generate(prompt_of([HEAD]), **options).token_ids == full.token_ids


@kinds
@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_disk_hits_and_misses_give_equal_answers(kind: str, kv_dtype: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kv_dtype": kv_dtype, "resident_bytes": 0}
    texts = [HEAD, A, B, ONE]
    engine = engine_of(kind, DirectoryStore(tmp_path), **settings)
    engine.encode([A, B])
    engine.encode(prompt_of(texts))
    missed, hit = (
        engine_of(kind, store, **settings).generate(prompt_of(texts), max_new_tokens=NEW)
        for store in (MemoryStore(1 << 28), DirectoryStore(tmp_path))
    )
    assert (missed.stats.hits, hit.stats.misses) == (0, 0)
    assert hit.token_ids == missed.token_ids
    if kv_dtype == "model":
        assert hit.token_ids == oracle_of(kind, texts).generate(NEW)
    else:
        found = engine.answer_logits(prompt_of(texts), [5]).float()
        assert EXACT < relative_error(found, oracle_of(kind, texts).logits()) < 0.3


@pytest.mark.parametrize("kind", ["shared", "latent", "state"])
def test_evicted_blocks_are_recomputed(kind: str) -> None:
    engine = engine_of(kind, MemoryStore(1 << 15), resident_bytes=0)
    expected = {text: oracle_of(kind, [HEAD, text, B]).generate(NEW) for text in (A, A + A, B)}
    for text in [*expected] * 2:
        answer = engine.generate(prompt_of([HEAD, text, B]), max_new_tokens=NEW)
        assert answer.token_ids == expected[text]


@kinds
def test_blocks_contain_the_layers_that_store_states(kind: str) -> None:
    model, (_, _, summary) = model_of_kinds(kind), KINDS[kind]
    engine = engine_of(kind)
    engine.encode([A])
    ((key,),) = [list(engine.store.keys())]
    kv = engine.store.get(key)
    assert kv is not None
    stored = sum(int(part.split()[0]) for part in summary.split(", ") if "attention" in part)
    shared = sum(int(part.split()[0]) for part in summary.split(", ") if "shared" in part)
    assert kv.num_layers == stored - shared == len(model.profile.layouts)
    assert kv.nbytes == model.bytes_per_token * kv.num_tokens


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "state" in kind or "latent" in kind])
def test_models_with_states_or_latent_attention_refuse_to_recompute(kind: str) -> None:
    because = "hybrid model" if "state" in KINDS[kind][2] else "multi-head latent attention"
    with pytest.raises(UnsupportedModelError, match=because):
        engine_of(kind, recipe=Recipe(recompute=0.1))


@pytest.mark.parametrize("kind", RECOMPUTING)
@pytest.mark.parametrize("assembly", ["relay", "copy"])
def test_recomputing_all_passages_gives_full_modes_answers(kind: str, assembly: Any) -> None:
    prompt = prompt_of([HEAD, A, ONE, B, A])
    for recipe in (Recipe("head:4", recompute=1.0), Recipe(promote=1, recompute=1.0)):
        engine = engine_of(kind, recipe=recipe, assembly=assembly)
        full = engine.generate(prompt, mode="full", max_new_tokens=NEW)
        found = engine.generate(prompt, max_new_tokens=NEW)
        assert found.token_ids == full.token_ids
        logits, expected = (
            engine.answer_logits(prompt, [5, 6], mode=mode) for mode in ("block", "full")
        )
        assert relative_error(logits, expected) <= EXACT


@pytest.mark.parametrize("kind", RECOMPUTING)
def test_auto_recomputes_for_stock_models(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = new_model(kind)
    assert BlockAttentionEngine(model, recipe="auto").recipe == Recipe("head", recompute=0.1)
    assert "uses 'head+recompute:0.1', which recomputes 10 %" in caplog.text


def test_stock_hybrid_models_promote_one_passage() -> None:
    assert engine_of("state", recipe="auto").recipe == STOCK
    assert engine_of("latent", recipe="auto").recipe == Recipe("head:4")


def test_head_states_are_computed_once_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("state")
    heads, computed = model._head_states, []
    original = heads._computed
    heads._computed = lambda head: computed.append(head) or original(head)  # type: ignore
    engine = BlockAttentionEngine(model, recipe=STOCK)
    other = BlockAttentionEngine(model, recipe=STOCK)
    for one, head in ((engine, HEAD), (other, HEAD), (engine, B), (engine, HEAD)):
        one.generate(prompt_of([head, A, B]), max_new_tokens=1)
    assert len(computed) == len(heads) == 2
    monkeypatch.setattr(states, "MOST_BYTES", 0)
    engine.generate(prompt_of([ONE, A, B]), max_new_tokens=1)
    assert (len(computed), len(heads)) == (3, 1)


def test_adapters_are_refused_for_latent_attention_and_exact_in_hybrid_models() -> None:
    with pytest.raises(UnsupportedModelError, match="multi-head latent attention"):
        engine_of("latent", recipe=recipe_of(model_of_kinds("latent")))
    for kind in ("state", "attention and state"):
        recipe = recipe_of(model_of_kinds(kind), promote=1)
        found = engine_of(kind, recipe=recipe).answer_logits(prompt_of([HEAD, A, ONE, B]), [5])
        expected = oracle_of(kind, [HEAD, A, ONE, B], recipe).logits()
        assert relative_error(found.float(), expected) <= EXACT


def test_head_states_are_not_computed_under_autocast() -> None:
    model = new_model("state")
    engine = BlockAttentionEngine(model, recipe=STOCK)
    engine.encode(prompt_of([HEAD, A]))
    expected = engine.answer_logits(prompt_of([HEAD, A, B]), [5])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="Autocast"):
        BlockAttentionEngine(new_model("state"), recipe=STOCK).answer_logits(
            prompt_of([HEAD, A, B]), [5]
        )
    assert torch.equal(engine.answer_logits(prompt_of([HEAD, A, B]), [5]), expected)
