"""The protocol: what is read of it, what is refused, and keys as the local engine has them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag import Block, BlockAttentionEngine, BlockModel
from blockattn_rag.errors import BlockAttnError, ProtocolError, ServingError
from blockattn_rag.kv.block_kv import token_digest
from blockattn_rag.prompts.blocks import BlockPrompt, Span, keep_of
from blockattn_rag.server.measured_profile import profile_of
from blockattn_rag.server.protocol import (
    MOST_BLOCKS,
    BlockPlan,
    ServedBlocks,
    block_keys,
    full_mode_salt,
    is_salt,
    parse_plan,
    salt,
)
from blockattn_rag.store import MemoryStore
from tests.models import shared_tiny_llama, tiny_tokenizer
from tests.server.profiles import SINK_IDS, make_profile

SECRET = "of this server alone"
PROFILE = make_profile(vocab_size=1000)


def asked(**fields: Any) -> dict[str, Any]:
    """Parameters of a request; a field of None is left out."""
    told = {"v": 1, "op": "complete", "lengths": [3, 2], **fields}
    return {"blockattn": {name: value for name, value in told.items() if value is not None}}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
names = st.sampled_from(["v", "op", "lengths", "namespace", "mac", "mode", "blocks", "fetch_s"])
values = anything | st.sampled_from([1, "complete", "encode", "block", "", "a" * 64])
nearly = st.fixed_dictionaries(
    {},
    optional={
        "v": st.just(1) | anything,
        "op": st.sampled_from(["complete", "encode"]) | anything,
        "lengths": st.lists(st.integers(-1, 9) | anything, max_size=4) | anything,
        "keep": st.lists(st.sampled_from(["store", "memory", "private"]), max_size=4) | anything,
        "namespace": st.sampled_from(["", "a", "/"]) | anything,
        "mac": st.text("0123456789abcdef", min_size=64, max_size=64) | anything,
        "more": anything,
    },
)


# -- plans -----------------------------------------------------------------------------------------


def test_a_plan_is_read_as_it_was_told() -> None:
    plan = BlockPlan("complete", (3, 2))
    assert parse_plan(json.loads(json.dumps(plan.to_dict())), 6) == plan
    assert plan.context_tokens == 5
    assert plan.to_dict() == {"blockattn": {"v": 1, "op": "complete", "lengths": [3, 2]}}


def test_a_plan_tells_what_may_become_of_blocks_if_not_all_may_be_stored() -> None:
    plan = BlockPlan("complete", (3, 2), keep=("memory", "private"))
    told = plan.to_dict()["blockattn"]
    assert told == {"v": 1, "op": "complete", "lengths": [3, 2], "keep": ["memory", "private"]}
    assert parse_plan(json.loads(json.dumps(plan.to_dict())), 6) == plan
    assert [plan.keep_at(0), plan.keep_at(1)] == ["memory", "private"]
    every = BlockPlan("complete", (3, 2), keep=("store", "store"))
    assert every == BlockPlan("complete", (3, 2))
    assert every.keep_at(1) == "store"
    assert "keep" not in every.to_dict()["blockattn"]


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}])
def test_parameters_of_others_hold_no_plan(params: Any) -> None:
    assert parse_plan(params, 6) is None


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ([], "must be an object"),
        ({"blockattn": None}, "blockattn must be an object, found None"),
        ({**asked(), "remote_host": "10.0.0.1"}, "unknown field 'remote_host'"),
        (asked(path="/etc/passwd"), "unknown field 'path'"),
        (asked(lengths=None), "found no field 'lengths'"),
        (asked(v=2), "found version 2 of the protocol, expected 1"),
        (asked(v=True), "found version True"),
        (asked(op="delete"), "op must be one of complete, encode; found 'delete'"),
        (asked(op=["complete"]), "op must be one of"),
        (asked(lengths="32"), "lengths must be a list"),
        (asked(lengths=[]), "lengths must have 1 to 256 items, found 0"),
        (asked(lengths=[1] * (MOST_BLOCKS + 1)), "1 to 256 items, found 257"),
        (asked(lengths=[3, 0]), r"lengths\[1\] must be a whole number at least 1, found 0"),
        (asked(lengths=[True]), "found True"),
        (asked(lengths=[3.0]), "found 3.0"),
        (asked(lengths=[10**6000]), "found a number of 19932 bits"),
        (asked(lengths=[3, 3]), "lengths add up to 6 tokens, expected at most 5"),
        (asked(op="encode", lengths=[3, 2]), "takes one block, found 2"),
        (asked(op="encode", lengths=[7]), "lengths add up to 7 tokens, expected at most 6"),
        (asked(keep=["private"]), "keep must have 2 items, found 1"),
        (asked(keep=[]), "keep must have 2 items, found 0"),
        (asked(keep="private"), "keep must be a list, found 'private'"),
        (asked(keep=["store", "disk"]), r"keep\[1\] must be one of store, memory, "),
        (asked(keep=["store", 1]), r"keep\[1\] must be one of"),
        (asked(namespace="a"), "mac must be 64 hex digits, found None"),
        (asked(mac="0" * 64), "a namespace is named by"),
        (asked(namespace="a", mac="é" * 64), "mac must be 64 hex digits"),
        (asked(namespace="a", mac="0" * 64), "by the secret that tenant_secret_env names"),
        (asked(namespace="../a", mac="0" * 64), "a namespace is named by"),
    ],
)  # fmt: skip
def test_what_is_not_as_the_protocol_has_it_is_refused_with_a_reason(params: Any, why: str) -> None:
    with pytest.raises(ProtocolError, match=why) as caught:
        parse_plan(params, 6, secret=SECRET)
    assert len(str(caught.value)) < 400
    assert isinstance(caught.value, (ServingError, ValueError))
    assert isinstance(caught.value, BlockAttnError)


@given(st.dictionaries(st.just("blockattn") | names, nearly | anything) | anything)
def test_whatever_a_client_sends_it_is_a_plan_within_bounds_or_refused(params: Any) -> None:
    try:
        plan = parse_plan(params, 6, namespace="own")
    except ProtocolError:
        return
    if plan is None:
        assert params is None or "blockattn" not in params
        return
    assert plan.namespace == "own", "no client names its namespace"
    assert all(type(n) is int and n >= 1 for n in plan.lengths)
    assert 1 <= len(plan.lengths) <= (1 if plan.op == "encode" else MOST_BLOCKS)
    assert plan.context_tokens <= (6 if plan.op == "encode" else 5)
    assert parse_plan(plan.to_dict(secret=SECRET), 6, secret=SECRET) == plan


# -- namespaces ------------------------------------------------------------------------------------


def test_a_namespace_is_named_by_whoever_has_the_secret() -> None:
    plan = BlockPlan("complete", (3, 2), "tenant-1")
    params = plan.to_dict(SECRET)
    assert parse_plan(params, 6, secret=SECRET, namespace="own") == plan
    for secret in (None, "another"):
        with pytest.raises(ProtocolError, match="may not name its namespace"):
            parse_plan(params, 6, secret=secret)


def test_who_names_no_namespace_has_the_server_s() -> None:
    plan = parse_plan(asked(), 6, secret=SECRET, namespace="own")
    assert plan is not None
    assert plan.namespace == "own"


@pytest.mark.parametrize(
    "changed",
    [
        {"namespace": "tenant-2"},
        {"lengths": [2, 3]},
        {"namespace": ""},
        {"keep": ["store", "store"]},
        {"keep": ["private", "store"]},
    ],
)
def test_a_code_holds_for_the_plan_that_it_was_made_for_alone(changed: dict[str, Any]) -> None:
    params = BlockPlan("complete", (3, 2), "tenant-1", ("store", "private")).to_dict(SECRET)
    params["blockattn"] |= changed
    with pytest.raises(ProtocolError, match="may not name its namespace"):
        parse_plan(params, 6, secret=SECRET)
    encoding = BlockPlan("complete", (3,), "tenant-1").to_dict(SECRET)
    encoding["blockattn"]["op"] = "encode"
    with pytest.raises(ProtocolError, match="may not name its namespace"):
        parse_plan(encoding, 6, secret=SECRET)


def test_a_client_cannot_write_a_plan_with_a_namespace() -> None:
    with pytest.raises(ValueError, match="tenant secret"):
        BlockPlan("complete", (3,), "tenant-1").to_dict()


def test_the_namespace_that_a_server_has_anyway_needs_no_naming() -> None:
    params = BlockPlan("complete", (3,), "own").to_dict(default="own")
    plan = parse_plan(params, 6, namespace="own")
    assert plan is not None
    assert plan.namespace == "own"
    with pytest.raises(ValueError, match="tenant secret"):
        BlockPlan("complete", (3,)).to_dict(default="own")


# -- salts -----------------------------------------------------------------------------------------


def test_a_salt_tells_apart_all_that_decides_keys_and_values() -> None:
    plan = BlockPlan("complete", (3, 2))
    others = [
        salt(BlockPlan("complete", (2, 3)), PROFILE),
        salt(BlockPlan("complete", (32,)), PROFILE),
        salt(BlockPlan("complete", (3, 2), "tenant-1"), PROFILE),
        salt(plan, replace(PROFILE, fingerprint="0" * 64)),
        salt(plan, replace(PROFILE, sink="head:2", sink_ids=SINK_IDS)),
        salt(BlockPlan("encode", (3,)), PROFILE),
        salt(BlockPlan("complete", (3,)), PROFILE),
        salt(plan, PROFILE, "the client's"),
        salt(plan, PROFILE, "another client's"),
        salt(BlockPlan("complete", (3, 2), keep=("private", "store")), PROFILE),
        salt(BlockPlan("complete", (3, 2), keep=("store", "private")), PROFILE),
        salt(BlockPlan("encode", (3,), keep=("private",)), PROFILE),
    ]
    own = salt(plan, PROFILE)
    assert own == salt(BlockPlan("complete", (3, 2), keep=("memory", "store")), PROFILE)
    assert own == salt(BlockPlan("complete", (3, 2)), PROFILE)
    assert len({own, *others}) == 1 + len(others)
    assert all(is_salt(one) and len(one) == 44 for one in (own, *others))


def test_full_mode_has_a_salt_for_each_tenant_that_needs_the_secret() -> None:
    told = {
        full_mode_salt(secret, namespace, given)
        for secret in ("a secret", "another")
        for namespace in ("", "tenant-1", "tenant-2")
        for given in (None, "", "mine")
    }
    assert len(told) == 2 * 3 * 3
    assert not any(is_salt(one) for one in told)  # which the connector takes from full mode
    assert all(len(one) <= 128 and not set(one) & set("@/\\\0") for one in told)  # vLLM's bounds


@pytest.mark.parametrize("text", [None, "", "ba1-", "ba1-" + "0" * 39, "x" * 44, 7])
def test_a_client_s_own_salt_is_none_of_ours(text: Any) -> None:
    assert not is_salt(text)
    assert not is_salt(salt(BlockPlan("encode", (3,)), PROFILE) + "\n")


# -- keys ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    return BlockAttentionEngine(model, store=MemoryStore(1 << 24))


@pytest.mark.parametrize("sink", ["none", "bos", "head:4"])
def test_what_the_local_engine_stored_is_found_on_a_server(
    engine: BlockAttentionEngine, sink: str
) -> None:
    store = MemoryStore(1 << 24)
    local = BlockAttentionEngine(engine.model, store=store, recipe=sink)
    prompt = BlockPrompt.from_texts(["first passage", "second", "first passage", "question?"])
    local.encode(prompt)
    ids = engine.model.tokenizer.prompt_ids(prompt)
    profile = profile_of(engine.model, sink)
    plan = BlockPlan("complete", tuple(map(len, ids.context)))
    found = block_keys(ids.flat, plan, profile)
    assert sorted({one.key for one in found}) == sorted(store.keys())
    for one, tokens in zip(found, ids.context, strict=True):
        kv = store.get(one.key)
        assert kv is not None
        assert kv.token_ids.tolist() == tokens == list(one.ids)
        assert kv.digest == one.digest
        assert ids.flat[one.start : one.start + len(tokens)] == tokens
    assert [one.place for one in found] == [0, 1, 2]


@pytest.mark.parametrize("sink", ["none", "head:4"])
def test_what_a_server_encodes_is_found_by_the_local_engine(
    engine: BlockAttentionEngine, sink: str
) -> None:
    profile = profile_of(engine.model, sink)
    store = MemoryStore(1 << 24)
    local = BlockAttentionEngine(engine.model, store=store, recipe=sink)
    for block, first in ((Block("the first of a prompt"), True), (Block("another"), False)):
        ids = engine.model.tokenizer.block_ids(block, first=first)
        before = [] if first else list(profile.sink_ids)
        [one] = block_keys([*before, *ids], BlockPlan("encode", (len(ids),)), profile)
        local.encode(BlockPrompt((Block("x"), block) if not first else (block, Block("y")), "?"))
        kv = store.get(one.key)
        assert kv is not None
        assert (kv.token_ids.tolist(), one.start) == (ids, len(before))


def test_only_the_first_block_of_a_prompt_is_encoded_without_the_sink() -> None:
    profile = make_profile(sink_ids=SINK_IDS, vocab_size=1000)
    found = block_keys([1, 2, 1, 2, 3], BlockPlan("complete", (2, 2)), profile)
    assert [one.digest for one in found] == [
        token_digest([1, 2]),
        token_digest([1, 2], SINK_IDS),
    ]


def test_a_block_that_stands_after_anything_but_the_sink_is_not_encoded() -> None:
    plan = BlockPlan("encode", (2,))
    profile = make_profile(sink_ids=SINK_IDS, vocab_size=1000)
    assert block_keys([*SINK_IDS, 1, 2], plan, profile)[0].start == 2
    for before in ([256, 8], [7, 256], [256], [1, 256, 7]):
        with pytest.raises(ProtocolError, match="tokens before the block to be encoded"):
            block_keys([*before, 1, 2], plan, profile)
    with pytest.raises(ProtocolError, match="found 2 tokens before the block"):
        block_keys([*SINK_IDS, 1, 2], plan, PROFILE)


def test_a_plan_that_does_not_fit_its_prompt_has_no_keys() -> None:
    with pytest.raises(ProtocolError, match="add up to 5 tokens, expected at most 4"):
        block_keys([1, 2, 3, 4, 5], BlockPlan("complete", (3, 2)), PROFILE)


def test_a_block_is_looked_for_in_its_namespace_first_and_then_where_tenants_share() -> None:
    tokens, plan = [1, 2, 3], BlockPlan("complete", (2,), "tenant-1")
    [one] = block_keys(tokens, plan, PROFILE, ["shared", "tenant-1"])
    [own] = block_keys(tokens, plan, PROFILE)
    [shared] = block_keys(tokens, BlockPlan("complete", (2,), "shared"), PROFILE)
    assert one.keys == (own.key, shared.key)
    assert one.key == own.key != shared.key


def test_a_private_block_is_looked_for_among_private_ones_of_its_tenant_alone() -> None:
    tokens = [1, 2, 1, 2, 1, 2, 3]
    plan = BlockPlan("complete", (2, 2, 2), "a", ("store", "memory", "private"))
    stored, kept, private = block_keys(tokens, plan, PROFILE, ["shared"])
    assert stored.keys == kept.keys
    assert private.namespaces == ("a/private",)
    assert not {*private.keys} & {*stored.keys}
    [other] = block_keys(tokens, BlockPlan("complete", (2,), "b", ("private",)), PROFILE)
    assert other.key != private.key
    assert [one.keep for one in (stored, kept, private)] == ["store", "memory", "private"]


def test_a_private_block_has_the_key_that_the_local_engine_has_in_memory(
    engine: BlockAttentionEngine,
) -> None:
    store = MemoryStore(1 << 24)  # where the local engine keeps private blocks too
    local = BlockAttentionEngine(engine.model, store=store, namespace="a", recipe="none")
    turn = Block.of([Span("An earlier turn.", "conversation")])
    prompt = BlockPrompt((turn, Block("a passage")), "question?")
    local.generate(prompt, max_new_tokens=1)
    ids = engine.model.tokenizer.prompt_ids(prompt)
    keep = tuple(keep_of(block.origin) for block in prompt.context)
    plan = BlockPlan("complete", tuple(map(len, ids.context)), "a", keep)
    found = block_keys(ids.flat, plan, profile_of(engine.model))
    assert sorted(one.key for one in found) == sorted(store.keys())
    assert keep == ("private", "store")


# -- answers ---------------------------------------------------------------------------------------

SERVED = ServedBlocks(3, 400, 57, encoded=1, encoded_tokens=20, fetch_s=0.25, int8_blocks=2)


def test_an_answer_is_read_as_it_was_told() -> None:
    told = json.loads(json.dumps(SERVED.to_dict()))
    assert ServedBlocks.from_dict(told) == SERVED
    assert ServedBlocks.from_dict({**told, "another_connector": {}}) == SERVED
    assert told["blockattn"]["mode"] == "block"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"mode": "full"}, "mode must be one of block; found 'full'"),
        ({"v": 2}, "found version 2"),
        ({"blocks": -1}, "blocks must be a whole number at least 0, found -1"),
        ({"loaded_tokens": 4.0}, "loaded_tokens must be a whole number"),
        ({"fetch_s": float("nan")}, "fetch_s must be a number from 0, found nan"),
        ({"fetch_s": -0.5}, "fetch_s must be a number from 0, found -0.5"),
        ({"fetch_s": "fast"}, "fetch_s must be a number"),
        ({"encoded_tokens": 0}, "found 1 encoded blocks of 0 tokens together"),
        ({"encoded": 0}, "found 0 encoded blocks of 20 tokens together"),
        ({"cut_short": 1}, "cut_short must be true or false, found 1"),
        ({"cut_short": True}, "found cut_short and figures that are unknown then"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_an_answer_that_is_not_as_the_protocol_has_it_is_refused(
    changed: dict[str, Any], why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        ServedBlocks.from_dict({"blockattn": SERVED.to_dict()["blockattn"] | changed})


@pytest.mark.parametrize("params", [None, {}, {"other": 1}])
def test_an_answer_without_our_field_was_not_computed_in_block_mode(params: Any) -> None:
    with pytest.raises(ProtocolError, match="not computed in block mode"):
        ServedBlocks.from_dict(params)


@given(st.dictionaries(names, values).map(lambda told: {"blockattn": told}) | anything)
def test_whatever_a_server_answers_it_is_read_or_refused(params: Any) -> None:
    try:
        served = ServedBlocks.from_dict(params)
    except ProtocolError:
        return
    assert served.to_dict()["blockattn"] == params["blockattn"]


def test_the_protocol_needs_no_torch() -> None:
    code = "import sys, blockattn_rag.server.protocol; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
