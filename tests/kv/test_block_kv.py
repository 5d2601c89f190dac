"""Blocks: sizes, copies and keys."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from blockattn_rag.kv.block_kv import BlockKV, corrected_digest, store_key, token_digest
from blockattn_rag.kv.rope import NO_ROTATION, RotaryLayout

HEADS, HEAD_DIM = 2, 8
TURNS = RotaryLayout(10.0 ** -torch.arange(4.0), "half")
LAYOUTS = (TURNS, NO_ROTATION, TURNS)


def block(tokens: int, seed: int) -> BlockKV:
    generator = torch.Generator().manual_seed(seed)

    def states() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(HEADS, tokens, HEAD_DIM, generator=generator) for _ in LAYOUTS)

    ids = torch.arange(tokens) + 100 * seed
    return BlockKV(states(), states(), ids, "fingerprint", f"digest {seed}", "handle")


def bytes_of(kv: BlockKV) -> str:
    states = b"".join(t.numpy().tobytes() for t in (*kv.keys, *kv.values, kv.token_ids))
    return hashlib.sha256(states).hexdigest()


def test_moving_a_block_to_its_own_device_returns_it() -> None:
    one = block(3, 1)
    assert one.to(torch.device("cpu")) is one
    away = one.to(torch.device("meta"))
    assert away.keys[0].device.type == "meta"
    assert away.digest == one.digest


def test_a_copy_has_the_same_values_in_one_memory_buffer() -> None:
    one = block(3, 1)
    # The values have another head size.
    one = replace(one, values=tuple(t[..., :2] for t in one.values))
    copy = one.copy_to(torch.device("cpu"))
    for mine, theirs in zip((*one.keys, *one.values), (*copy.keys, *copy.values), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
    places = {t.untyped_storage().data_ptr() for t in (*copy.keys, *copy.values)}
    assert len(places) == 1
    assert copy.nbytes == copy.keys[0].untyped_storage().nbytes() == one.nbytes


def test_a_copy_keeps_dtypes_but_no_other_memory_alive() -> None:
    whole = torch.arange(1000)  # for example, a complete file
    one = block(3, 1)
    one = replace(one, keys=tuple(t.half() for t in one.keys), token_ids=whole[10:13])
    copy = one.copy_to(torch.device("cpu"))
    assert {t.dtype for t in copy.keys} == {torch.float16}
    assert {t.dtype for t in copy.values} == {torch.float32}
    assert bytes_of(copy) == bytes_of(one)
    assert copy.values[0].data_ptr() != one.values[0].data_ptr()
    assert copy.token_ids.untyped_storage().nbytes() == 3 * 8
    assert copy.token_ids.data_ptr() != one.token_ids.data_ptr()


def test_sizes_of_a_block() -> None:
    one = block(3, 1)
    assert (one.num_tokens, one.num_layers) == (3, 3)
    assert one.nbytes == 3 * 2 * HEADS * 3 * HEAD_DIM * 4


def test_a_store_key_depends_on_tenant_model_and_tokens() -> None:
    keys = {store_key(m, ids, who) for m in ("a", "b") for ids in ("x", "y") for who in ("", "t")}
    assert len(keys) == 8
    assert store_key("a", "x", "t") == hashlib.sha256(b"t:a:x").hexdigest()
    assert replace(block(3, 1), namespace="t").key == store_key("fingerprint", "digest 1", "t")


def test_a_digest_is_that_of_the_token_ids_as_64_bit_little_endian_integers() -> None:
    expected = hashlib.sha256(bytes.fromhex("0100000000000000 0203000000000000")).hexdigest()
    assert token_digest([1, 0x0302]) == expected


def test_a_digest_depends_on_how_a_block_was_encoded() -> None:
    ids = [1, 2]
    sinks: tuple[list[int], ...] = ([], [1], [2], [1, 2], [12])
    corrections = ("", "c", "d")
    digests = {token_digest(ids, sink, by) for sink in sinks for by in corrections}
    assert len(digests) == 15
    assert token_digest(ids) in digests
    assert token_digest([2, 1]) not in digests
    assert corrected_digest(token_digest(ids, [1]), "c") == token_digest(ids, [1], "c")
