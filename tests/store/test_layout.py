"""Ranges of an entry: what ranks read, put together, and what each of them finds damaged."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.format import encode, parse_token_ids, verify
from blockattn_rag.store.header import FormatError, Header, read_header
from blockattn_rag.store.layout import Kind, LayerShape, Layout, Piece, ranges, share_of
from tests.store.kvs import kvs, make_kv, quantised_kvs

RANKS = st.sampled_from([1, 2, 3, 4, 8, 16])


def entry_of(kv: BlockKV) -> tuple[bytes, Header]:
    content = b"".join(encode(kv))
    return content, read_header(io.BytesIO(content), len(content))


def cut(
    content: bytes, header: Header, heads: range, layers: range
) -> tuple[list[Piece], list[tuple[int, memoryview]]]:
    """Pieces of some heads and layers, and the ranges that have them, with their places."""
    pieces = [*header.layout.pieces(heads, layers)]
    return pieces, [(start, memoryview(content)[start:stop]) for start, stop in ranges(pieces)]


def shares(header: Header, tensor_ranks: int, pipeline_ranks: int) -> list[tuple[range, range]]:
    """The heads and the layers of each rank."""
    heads, layers = header.layout.num_heads, len(header.layout.layers)
    return [
        (share_of(tensor, tensor_ranks, heads), share_of(pipeline, pipeline_ranks, layers))
        for tensor in range(tensor_ranks)
        for pipeline in range(pipeline_ranks)
    ]


@given(kvs() | quantised_kvs(), RANKS, RANKS)
@settings(deadline=None)
def test_ranks_together_read_entry(kv: BlockKV, tensor_ranks: int, pipeline_ranks: int) -> None:
    content, header = entry_of(kv)
    _, start = header.layout.place("token_ids")
    joined = bytearray(len(content))
    joined[:start] = content[:start]
    read = set(range(start))
    for heads, layers in shares(header, tensor_ranks, pipeline_ranks):
        pieces, parts = cut(content, header, heads, layers)
        verify(header, pieces, parts)
        for at, part in parts:
            joined[at : at + len(part)] = part
            read |= set(range(at, at + len(part)))
    assert joined == content
    assert read == set(range(len(content)))


@given(kvs() | quantised_kvs())
def test_pieces_are_numbered_as_they_come(kv: BlockKV) -> None:
    layout = Layout.of(kv)
    expected = {piece[:3]: number for number, piece in enumerate(layout.pieces())}
    assert layout.piece_numbers == expected


@given(kvs() | quantised_kvs(), RANKS, RANKS, st.data())
@settings(deadline=None)
def test_a_flipped_bit_is_found_by_every_range_that_holds_it_and_by_no_other(
    kv: BlockKV, tensor_ranks: int, pipeline_ranks: int, data: st.DataObject
) -> None:
    content, header = entry_of(kv)
    _, start = header.layout.place("token_ids")
    at = data.draw(st.integers(start, len(content) - 1))
    damaged = bytearray(content)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    found = 0
    for heads, layers in shares(header, tensor_ranks, pipeline_ranks):
        pieces, parts = cut(bytes(damaged), header, heads, layers)
        holds = any(start <= at < start + len(part) for start, part in parts)
        try:
            verify(header, pieces, parts)
            assert not holds
        except FormatError:
            assert holds
            found += 1
    assert found >= 1


def test_damage_is_named_by_head_kind_and_layer() -> None:
    content, header = entry_of(make_kv(layers=3, heads=2))
    place = header.layout.place("head.1.values")
    damaged = bytearray(content)
    damaged[place.stop - 1] ^= 1
    pieces, parts = cut(bytes(damaged), header, range(1, 2), range(3))
    with pytest.raises(FormatError, match="the values of head 1 in layer 2 are damaged"):
        verify(header, pieces, parts)


def test_damaged_token_ids_are_found_by_themselves() -> None:
    kv = make_kv()
    content, header = entry_of(kv)
    raw = bytearray(content[slice(*header.layout.place("token_ids"))])
    assert parse_token_ids(header, raw).tolist() == kv.token_ids.tolist()
    raw[3] ^= 4
    with pytest.raises(FormatError, match="token ids are damaged"):
        parse_token_ids(header, raw)


@pytest.mark.parametrize("quantised", [False, True])
def test_heads_are_one_range_and_layers_a_few(quantised: bool) -> None:
    layout = Layout.of(make_kv(layers=6, heads=8, tokens=16, quantised=quantised))
    for ranks in (1, 2, 4, 8, 16):
        for rank in range(ranks):
            assert len(ranges(layout.pieces(share_of(rank, ranks, 8)))) == 1
    per_head = 4 if quantised else 2  # keys and values, and their scales
    assert len(ranges(layout.pieces(layers=range(2, 4)))) == 8 * per_head
    assert ranges(layout.pieces())[0].stop == layout.nbytes


@pytest.mark.parametrize(("rank", "ranks", "count"), [(2, 2, 4), (-1, 2, 4), (0, 0, 4), (0, 1, 0)])
def test_no_such_rank_is_refused(rank: int, ranks: int, count: int) -> None:
    with pytest.raises(ValueError, match="expected a rank from 0"):
        share_of(rank, ranks, count)


def test_the_layout_of_an_8b_model_says_what_a_header_costs() -> None:
    kv = make_kv(layers=32, heads=8, tokens=4, head_dim=128, dtype=torch.bfloat16)
    assert Layout.of(kv).data_start < 24 << 10


def test_finding_pieces_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    of = LayerShape.of

    def counted(layer: LayerShape, kind: Kind) -> tuple[int, int, torch.dtype]:
        nonlocal looks
        looks += 1
        return of(layer, kind)

    monkeypatch.setattr(LayerShape, "of", counted)
    layer = LayerShape(4, 8, 8, torch.float32, torch.float32)
    pieces = list(Layout(3, (layer,) * 100).pieces())
    assert len(pieces) == 800
    assert looks < 2 * len(pieces)
