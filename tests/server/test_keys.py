"""Cache salts of requests, and store keys, which equal those of the local engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockattn_rag import Block, BlockAttentionEngine, BlockModel
from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import ProtocolError
from blockattn_rag.kv.block_kv import token_digest
from blockattn_rag.prompts.blocks import IN_MEMORY, PRIVATE, STORED, BlockPrompt, Span, keep_of
from blockattn_rag.server.keys import block_keys, full_mode_salt, is_salt, salt
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.profile import profile_of
from blockattn_rag.store import MemoryStore
from tests.models import shared_tiny_llama, tiny_tokenizer
from tests.recipes import recipe_of
from tests.server.profiles import SINK_IDS, make_profile

PROFILE = make_profile(vocab_size=1000)


# -- salts -----------------------------------------------------------------------------------------


def test_salts_depend_on_everything_that_affects_keys_and_values() -> None:
    plan = BlockPlan("complete", (3, 2), keep=(STORED, STORED))
    others = [
        salt(replace(plan, lengths=(2, 3)), PROFILE),
        salt(BlockPlan("complete", (32,), keep=(STORED,)), PROFILE),
        salt(replace(plan, namespace="tenant-1"), PROFILE),
        salt(plan, replace(PROFILE, fingerprint="0" * 64)),
        salt(plan, replace(PROFILE, sink_ids=SINK_IDS)),
        salt(plan, replace(PROFILE, recipe=RecipeOutline("none", adapter="a" * 64))),
        salt(BlockPlan("encode", (3,), keep=(STORED,)), PROFILE),
        salt(BlockPlan("complete", (3,), keep=(STORED,)), PROFILE),
        salt(BlockPlan("complete", (3, 2)), PROFILE),
        salt(plan, PROFILE, "the client's"),
        salt(plan, PROFILE, "another client's"),
        salt(BlockPlan("complete", (3, 2), keep=(PRIVATE, STORED)), PROFILE),
        salt(BlockPlan("complete", (3, 2), keep=(STORED, PRIVATE)), PROFILE),
        salt(BlockPlan("encode", (3,), keep=(PRIVATE,)), PROFILE),
    ]
    own = salt(plan, PROFILE)
    assert own == salt(BlockPlan("complete", (3, 2), keep=(IN_MEMORY, STORED)), PROFILE)
    assert len({own, *others}) == 1 + len(others)
    assert all(is_salt(one) and len(one) == 44 for one in (own, *others))


def test_full_mode_salts_depend_on_the_tenant_and_the_secret() -> None:
    told = {
        full_mode_salt(secret, namespace, given)
        for secret in ("a secret", "another")
        for namespace in ("", "tenant-1", "tenant-2")
        for given in (None, "", "mine")
    }
    assert len(told) == 2 * 3 * 3
    assert not any(is_salt(one) for one in told)  # salts of block mode differ
    assert all(len(one) <= 128 and not set(one) & set("@/\\\0") for one in told)  # limits of vLLM


@pytest.mark.parametrize("text", [None, "", "ba1-", "ba1-" + "0" * 39, "x" * 44, 7])
def test_salts_of_clients_differ_from_ours(text: Any) -> None:
    assert not is_salt(text)
    assert not is_salt(salt(BlockPlan("encode", (3,)), PROFILE) + "\n")


# -- keys ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    return BlockAttentionEngine(model, store=MemoryStore(1 << 24))


@pytest.fixture(params=["none", "bos", "head:4", "adapter none", "adapter head:4"])
def recipe(request: pytest.FixtureRequest, engine: BlockAttentionEngine) -> Recipe:
    kind, _, sink = request.param.rpartition(" ")
    return recipe_of(engine.model, sink=sink) if kind else Recipe(sink)


def test_server_finds_local_entries(engine: BlockAttentionEngine, recipe: Recipe) -> None:
    store = MemoryStore(1 << 24)
    local = BlockAttentionEngine(engine.model, store=store, recipe=recipe)
    prompt = BlockPrompt.from_texts(["first passage", "second", "first passage", "question?"])
    local.encode(prompt)
    ids = engine.model.tokenizer.prompt_ids(prompt)
    profile = profile_of(engine.model, recipe)
    plan = BlockPlan("complete", tuple(map(len, ids.context)), keep=(STORED,) * 3)
    found = block_keys(ids.flat, plan, profile)
    assert sorted({one.key for one in found}) == sorted(store.keys())
    for one, tokens in zip(found, ids.context, strict=True):
        kv = store.get(one.key)
        assert kv is not None
        assert kv.token_ids.tolist() == tokens == list(one.ids)
        assert kv.digest == one.digest
        assert ids.flat[one.start : one.start + len(tokens)] == tokens
    assert [one.place for one in found] == [0, 1, 2]


def test_local_engine_finds_server_entries(engine: BlockAttentionEngine, recipe: Recipe) -> None:
    profile = profile_of(engine.model, recipe)
    store = MemoryStore(1 << 24)
    local = BlockAttentionEngine(engine.model, store=store, recipe=recipe)
    for block, first in ((Block("the first of a prompt"), True), (Block("another"), False)):
        ids = engine.model.tokenizer.block_ids(block, first=first)
        before = [] if first else list(profile.sink_ids)
        plan = BlockPlan("encode", (len(ids),), keep=(STORED,), opens_prompt=first)
        [one] = block_keys([*before, *ids], plan, profile)
        local.encode(BlockPrompt((Block("x"), block) if not first else (block, Block("y")), "?"))
        kv = store.get(one.key)
        assert kv is not None
        assert (kv.token_ids.tolist(), one.start) == (ids, len(before))


def test_only_the_first_block_of_a_prompt_is_encoded_without_the_sink() -> None:
    profile = make_profile(sink_ids=SINK_IDS, vocab_size=1000)
    found = block_keys([1, 2, 1, 2, 3], BlockPlan("complete", (2, 2)), profile)
    assert [one.digest for one in found] == [token_digest([1, 2]), token_digest([1, 2], SINK_IDS)]


def test_a_block_after_anything_other_than_the_sink_is_not_encoded() -> None:
    plan = BlockPlan("encode", (2,))
    profile = make_profile(sink_ids=SINK_IDS, vocab_size=1000)
    assert block_keys([*SINK_IDS, 1, 2], plan, profile)[0].start == 2
    assert block_keys([1, 2], replace(plan, opens_prompt=True), profile)[0].start == 0
    for before in ([], [256, 8], [7, 256], [256], [1, 256, 7]):
        with pytest.raises(ProtocolError, match="tokens before the block to encode"):
            block_keys([*before, 1, 2], plan, profile)
    with pytest.raises(ProtocolError, match="Found 2 tokens before the block"):
        block_keys([*SINK_IDS, 1, 2], plan, PROFILE)


def test_blocks_are_looked_up_in_their_namespace_before_shared_ones() -> None:
    tokens, plan = [1, 2, 3], BlockPlan("complete", (2,), "tenant-1", (STORED,))
    [one] = block_keys(tokens, plan, PROFILE, ["shared", "tenant-1"])
    [own] = block_keys(tokens, plan, PROFILE)
    [shared] = block_keys(tokens, replace(plan, namespace="shared"), PROFILE)
    assert one.keys == (own.key, shared.key)
    assert one.key == own.key != shared.key


def test_private_blocks_are_only_looked_up_for_their_tenant() -> None:
    tokens = [1, 2, 1, 2, 1, 2, 3]
    plan = BlockPlan("complete", (2, 2, 2), "a", (STORED, IN_MEMORY, PRIVATE))
    stored, kept, private = block_keys(tokens, plan, PROFILE, ["shared"])
    assert stored.keys == kept.keys
    assert private.namespaces == ("a/private",)
    assert not {*private.keys} & {*stored.keys}
    [other] = block_keys(tokens, BlockPlan("complete", (2,), "b", (PRIVATE,)), PROFILE)
    assert other.key != private.key
    assert [one.keep for one in (stored, kept, private)] == [STORED, IN_MEMORY, PRIVATE]


def test_keys_of_private_blocks_equal_the_local_ones(engine: BlockAttentionEngine) -> None:
    store = MemoryStore(1 << 24)  # also keeps private blocks
    local = BlockAttentionEngine(engine.model, store=store, namespace="a", recipe="none")
    turn = Block.of([Span("An earlier turn.", "conversation")])
    prompt = BlockPrompt((turn, Block("a passage")), "question?")
    local.generate(prompt, max_new_tokens=1)
    ids = engine.model.tokenizer.prompt_ids(prompt)
    keep = tuple(keep_of(block.origin) for block in prompt.context)
    plan = BlockPlan("complete", tuple(map(len, ids.context)), "a", keep)
    found = block_keys(ids.flat, plan, profile_of(engine.model))
    assert sorted(one.key for one in found) == sorted(store.keys())
    assert keep == (PRIVATE, STORED)
