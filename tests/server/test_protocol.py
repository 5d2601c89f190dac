"""Messages between client and server: round trips, and refusals with a reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.errors import BlockAttnError, ProtocolError, ServingError
from blockattn_rag.prompts.blocks import IN_MEMORY, PRIVATE, STORED
from blockattn_rag.prompts.markers import marker_key
from blockattn_rag.server.plan import BlockPlan, ServedBlocks, parse_plan
from blockattn_rag.server.protocol import MOST_BLOCKS, EncodeAnswer, EncodeBody, marker_key_id
from blockattn_rag.server.validation import read_json
from tests.server.profiles import SERVER_INFO as INFO

SECRET = "of this server alone"
NESTED: Any = []
for _ in range(100_000):
    NESTED = [NESTED]


def asked(**fields: Any) -> dict[str, Any]:
    """Return the parameters of a request, without fields that are None."""
    told = {"v": 2, "op": "complete", "lengths": [3, 2], **fields}
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
        "v": st.just(2) | anything,
        "op": st.sampled_from(["complete", "encode"]) | anything,
        "lengths": st.lists(st.integers(-1, 9) | anything, max_size=4) | anything,
        "opens_prompt": st.booleans() | anything,
        "keep": st.lists(st.tuples(st.booleans(), st.booleans()).map(list), max_size=4) | anything,
        "namespace": st.sampled_from(["", "a", "/"]) | anything,
        "mac": st.text("0123456789abcdef", min_size=64, max_size=64) | anything,
        "more": anything,
    },
)


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        BlockPlan("complete", (3, 2)),
        BlockPlan("complete", (3, 2), keep=(IN_MEMORY, PRIVATE), fixed=(1,)),
        BlockPlan("encode", (3,), keep=(STORED,), opens_prompt=True),
    ],
)
def test_plans_survive_a_round_trip(plan: BlockPlan) -> None:
    assert parse_plan(json.loads(json.dumps(plan.to_dict())), 6) == plan
    assert plan.context_tokens == sum(plan.lengths)


def test_blocks_are_private_by_default() -> None:
    private = BlockPlan("complete", (3, 2), keep=(PRIVATE, PRIVATE))
    assert private == BlockPlan("complete", (3, 2)) == parse_plan(asked(), 6)


_OF_TENANTS = (
    "Only the server's own routes can create plans",
    "the same tenant secret in all processes",
    "A namespace consists of",
)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}])
def test_parameters_of_other_connectors_contain_no_plan(params: Any) -> None:
    assert parse_plan(params, 6) is None


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ([], "kv_transfer_params should be an object"),
        ({"blockattn": None}, "blockattn should be an object, found None"),
        ({**asked(), "remote_host": "10.0.0.1"}, "unknown field 'remote_host'"),
        (asked(lengths=None), "blockattn is missing the field 'lengths'; add it"),
        (asked(v=1), "Found version 1 of blockattn, expected 2"),
        (asked(op="delete"), "op should be 'complete' or 'encode', found 'delete'"),
        (asked(lengths="32"), "lengths should be a valid list, found '32'"),
        (asked(op="encode", lengths=[]), "takes one block, found 0"),
        (asked(lengths=[1] * (MOST_BLOCKS + 1)), "at most 256 items, found"),
        (asked(lengths=[3, 0]), r"lengths\[1\] should be greater than or equal to 1, found 0"),
        (asked(lengths=[10**6000]), "found an integer of 19932 bits"),
        (asked(lengths=[3, 3]), "lengths add up to 6 tokens, expected at most 5"),
        (asked(op="encode", lengths=[3, 2]), "takes one block, found 2"),
        (asked(op="encode", lengths=[7]), "lengths add up to 7 tokens, expected at most 6"),
        (asked(keep=[[True, False]]), r"keep: Expected one item per block \(2\), found 1"),
        (asked(keep="private"), "keep should be a valid list, found 'private'"),
        (asked(keep=[[False, True], "disk"]), r"keep\[1\] should be a list, .* found 'disk'"),
        (asked(), "Only the server's own routes can create plans"),
        (asked(namespace="a"), "Only the server's own routes can create plans"),
        (asked(mac="0" * 64), "Only the server's own routes can create plans"),
        (asked(namespace="a", mac="é" * 64), "Only the server's own routes can create plans"),
        (asked(namespace="a", mac=NESTED), "Only the server's own routes can create plans"),
        (asked(namespace="a", mac="0" * 64), "the same tenant secret in all processes"),
        (asked(namespace="../a", mac="0" * 64), "A namespace consists of"),
    ],
)  # fmt: skip
def test_invalid_parameters_are_refused_with_a_reason(params: Any, why: str) -> None:
    with pytest.raises(ProtocolError, match=why) as caught:
        parse_plan(params, 6, secret=SECRET if why in _OF_TENANTS else None)
    assert len(str(caught.value)) < 400
    assert isinstance(caught.value, (ServingError, ValueError))
    assert isinstance(caught.value, BlockAttnError)


@given(st.dictionaries(st.just("blockattn") | names, nearly | anything) | anything)
def test_any_parameters_give_a_plan_within_limits_or_an_error(params: Any) -> None:
    try:
        plan = parse_plan(params, 6, namespace="own")
    except ProtocolError:
        return
    if plan is None:
        assert params is None or "blockattn" not in params
        return
    assert plan.namespace == "own", "expected clients not to choose their namespace"
    assert all(type(n) is int and n >= 1 for n in plan.lengths)
    least, most = (1, 1) if plan.op == "encode" else (0, MOST_BLOCKS)
    assert least <= len(plan.lengths) <= most
    assert plan.context_tokens <= (6 if plan.op == "encode" else 5)
    assert parse_plan(plan.to_dict(secret=SECRET), 6, secret=SECRET) == plan


# -- namespaces ------------------------------------------------------------------------------------


def test_a_signed_plan_contains_its_namespace() -> None:
    plan = BlockPlan("complete", (3, 2), "tenant-1")
    params = plan.to_dict(SECRET)
    assert parse_plan(params, 6, secret=SECRET, namespace="own") == plan
    for secret in (None, "another"):
        with pytest.raises(ProtocolError, match="Only the server's own routes"):
            parse_plan(params, 6, secret=secret)


def test_plans_of_servers_without_tenants_use_the_default_namespace() -> None:
    plan = parse_plan(BlockPlan("complete", (3, 2), "tenant-1").to_dict(), 6, namespace="own")
    assert plan == BlockPlan("complete", (3, 2), "own")


@pytest.mark.parametrize(
    "changed",
    [
        {"namespace": "tenant-2"},
        {"lengths": [2, 3]},
        {"namespace": ""},
        {"keep": [[False, True]] * 2},
        {"keep": [[True, False], [False, True]]},
        {"opens_prompt": True},
    ],
)
def test_a_signature_is_valid_for_one_plan(changed: dict[str, Any]) -> None:
    params = BlockPlan("complete", (3, 2), "tenant-1", (STORED, PRIVATE)).to_dict(SECRET)
    params["blockattn"] |= changed
    with pytest.raises(ProtocolError, match="Only the server's own routes"):
        parse_plan(params, 6, secret=SECRET)
    encoding = BlockPlan("complete", (3,), "tenant-1").to_dict(SECRET)
    encoding["blockattn"]["op"] = "encode"
    with pytest.raises(ProtocolError, match="Only the server's own routes"):
        parse_plan(encoding, 6, secret=SECRET)


# -- answers ---------------------------------------------------------------------------------------

SERVED = ServedBlocks(
    3, 400, 57, encoded=1, encoded_tokens=20, fetch_s=0.25, int8_blocks=2, recomputed=[0, 7, 0]
)


def test_answers_survive_a_round_trip() -> None:
    told = json.loads(json.dumps(SERVED.to_dict()))
    assert ServedBlocks.from_dict(told) == SERVED
    assert ServedBlocks.from_dict({**told, "another_connector": {}}) == SERVED


def test_counts_of_an_answer_are_computed_from_its_blocks() -> None:
    counts = {"hits": 2, "misses": 1, "reused_tokens": 430, "computed_tokens": 70}
    assert SERVED.reuse((400, 37, 20), 500) == counts


@pytest.mark.parametrize("lengths", [(400, 57), (400, 37, 21)])
def test_an_answer_that_lacks_a_block_is_an_error(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="The engine used 3 blocks with 457 tokens"):
        SERVED.reuse(lengths, 500)


# -- routes ----------------------------------------------------------------------------------------

ANSWER = EncodeAnswer(("found", "encoded", "missing"), 7, 12)


@pytest.mark.parametrize("message", [INFO, ANSWER, EncodeAnswer(("found",))])
def test_messages_survive_json(message: Any) -> None:
    assert type(message).from_dict(json.loads(json.dumps(message.to_dict()))) == message


@pytest.mark.parametrize(
    ("message", "field", "value", "expected"),
    [
        (INFO, "v", 1, "Found version 1 of info, expected 2"),
        (INFO, "fingerprint", "a", "info.fingerprint should match pattern .*, found 'a'"),
        (INFO, "models", [], "models should have at least 1 item, found"),
        (INFO, "namespace", "../a", "A namespace consists of"),
        (INFO, "marker_key", "key", "info.marker_key should match pattern"),
        (INFO, "more", 1, "info has the unknown field 'more'; remove it"),
        (ANSWER, "passages", ["there"], r"answer.passages\[0\] should be 'found', 'encoded' or"),
        (ANSWER, "stored_bytes", -1, "stored_bytes should be greater than or equal to 0"),
    ],
)
def test_invalid_values_are_refused(message: Any, field: str, value: object, expected: str) -> None:
    with pytest.raises(ProtocolError, match=expected):
        type(message).from_dict({**message.to_dict(), field: value})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"texts": []}, "body.texts should have at least 1 item, found"),
        ({"texts": ["x"] * (MOST_BLOCKS + 1)}, "at most 256 items"),
        ({"texts": "x"}, "body.texts should be a valid list"),
        ({"texts": ["x", 5]}, r"body.texts\[1\] should be a valid string"),
        ({"texts": ["x", " "]}, "Text 1 is empty; remove empty passages"),
        ({"texts": ["\ud800"]}, "Text 0 contains a lone surrogate"),
        ({"texts": ["x"], "only_look": 1}, "body.only_look should be a valid boolean"),
        ({"blocks": [[1]]}, "body is missing"),
        ([], "body should be an object"),
    ],
)
def test_invalid_encode_bodies_are_refused(body: Any, expected: str) -> None:
    with pytest.raises(ProtocolError, match=expected):
        EncodeBody.from_dict(body)


def test_only_the_first_of_many_errors_is_reported() -> None:
    with pytest.raises(ValueError) as refused:
        EncodeBody(texts=[5] * 200)  # type: ignore[arg-type]
    assert refused.value.error_count() <= 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError) as refused:
        BlockPlan("complete", ["a"] * 9)  # type: ignore[arg-type]
    assert refused.value.error_count() <= 3  # type: ignore[attr-defined]


def test_a_body_of_many_unknown_fields_is_refused_before_it_is_validated() -> None:
    many = {f"field {number}": 1 for number in range(1000)}
    with pytest.raises(ProtocolError, match="body has 1001 fields, expected at most 100"):
        EncodeBody.from_dict({"texts": ["x"], **many})
    with pytest.raises(ProtocolError, match="blockattn has 1003 fields, expected at most 100"):
        parse_plan(asked(**many), 6)


@pytest.mark.parametrize("message", [INFO, ANSWER])
def test_a_missing_field_is_refused(message: Any) -> None:
    required = {"fingerprint", "models", "max_tokens", "namespace", "read_only", "passages"}
    for field in required & message.to_dict().keys():
        fields = message.to_dict()
        del fields[field]
        with pytest.raises(ProtocolError, match=f"is missing the field '{field}'; add it"):
            type(message).from_dict(fields)


def test_the_identifier_of_a_marker_key_does_not_reveal_it() -> None:
    name = marker_key_id()
    assert name == marker_key_id()
    assert len(name) == 16
    assert marker_key().hex()[:16] != name


# -- size and JSON of bodies -----------------------------------------------------------------------


def read(*chunks: bytes, max_tokens: int = 1) -> Any:
    async def sent() -> AsyncGenerator[bytes, None]:
        for chunk in chunks:
            yield chunk
        assert chunk != b"unread"

    return asyncio.run(read_json(sent(), max_tokens))


@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_size_limit_grows_with_the_context_window(max_tokens: int) -> None:
    most = (4 << 20) + 64 * max_tokens
    body = b'"' + b"x" * (most - 2) + b'"'
    assert len(read(body[:9], body[9:], max_tokens=max_tokens)) == most - 2
    with pytest.raises(ProtocolError, match=f"larger than {most:,} bytes"):
        read(body, b" ", b"unread", max_tokens=max_tokens)


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff", b"1" * 5000])
def test_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="The body is not valid JSON: "):
        read(body)
