"""The bytes of an entry: round trip, golden bytes, damage, and reading without this package."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import torch as safetensors_torch

from blockattn_rag.kv.block_kv import BlockKV, store_key
from blockattn_rag.store import format as entry
from blockattn_rag.store.checks import DTYPES, check_storable, is_finite
from blockattn_rag.store.format import FormatError, decode, encode, read_header
from tests.store.kvs import kvs, make_kv, same

FORMAT_PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def to_bytes(kv: BlockKV) -> bytes:
    return b"".join(encode(kv))


def from_bytes(content: bytes | bytearray) -> BlockKV:
    raw = torch.tensor(list(content), dtype=torch.uint8)
    return decode(raw)


def documented(name: str) -> Any:
    """A function that docs/format.md defines."""
    names: dict[str, Any] = {}
    for part in FORMAT_PAGE.read_text().split("```python\n")[1:]:
        exec(part.split("```")[0], names)
    return names[name]


def golden_kv() -> BlockKV:
    return BlockKV(
        keys=(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]),),
        values=(torch.tensor([[[-1.0], [0.5]]]),),
        token_ids=torch.tensor([7, 258]),
        fingerprint="model",
        digest="text",
        handle="passage",
    )


GOLDEN = (
    (360).to_bytes(8, "little")
    + b'{"__metadata__":{"format":"blockattn_rag.kv","version":"1",'
    + b'"xxh3_128":"c704dcb106ebcca6570502fbb9c90c39",'
    + b'"fingerprint":"model","digest":"text","handle":"passage"},'
    + b'"token_ids":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
    + b'"keys":{"dtype":"F32","shape":[1,1,2,2],"data_offsets":[16,32]},'
    + b'"values":{"dtype":"F32","shape":[1,1,2,1],"data_offsets":[32,40]}}'
    + b" " * 5
    + bytes.fromhex("0700000000000000 0201000000000000")
    + bytes.fromhex("0000803f 00000040 00004040 00008040")
    + bytes.fromhex("000080bf 0000003f")
)


@given(kvs())
@settings(deadline=None)
def test_decoding_gives_back_what_was_encoded(kv: BlockKV) -> None:
    assert same(from_bytes(to_bytes(kv)), kv)


def test_the_bytes_of_a_known_entry_never_change() -> None:
    assert to_bytes(golden_kv()) == GOLDEN


def test_a_non_contiguous_tensor_is_stored_as_what_it_shows() -> None:
    kv = make_kv()
    transposed = replace(kv, keys=tuple(k.mT.contiguous().mT for k in kv.keys))
    assert to_bytes(transposed) == to_bytes(kv)


@given(kvs())
@settings(deadline=None)
def test_keys_are_aligned_and_every_tensor_to_its_element_size(kv: BlockKV) -> None:
    content = to_bytes(kv)
    header = read_header(io.BytesIO(content), len(content))
    for spec in header.tensors.values():
        assert (header.data_start + spec.start) % spec.dtype.itemsize == 0
    if "keys" in header.tensors and kv.keys[0].element_size() <= 8:
        assert (header.data_start + header.tensors["keys"].start) % entry.ALIGNMENT == 0


def test_values_of_a_wider_dtype_than_the_keys_come_first_and_are_aligned() -> None:
    half = make_kv(head_dim=1, heads=1, layers=1, dtype=torch.float16)
    full = make_kv(layers=1, heads=1)
    kv = replace(half, values=full.values)
    content = to_bytes(kv)
    header = read_header(io.BytesIO(content), len(content))
    assert list(header.tensors) == ["token_ids", "values", "keys"]
    assert same(from_bytes(content), kv)


@given(kvs())
@settings(deadline=None, max_examples=30)
def test_the_safetensors_library_reads_an_entry(kv: BlockKV) -> None:
    tensors = safetensors_torch.load(to_bytes(kv))
    assert torch.equal(tensors["token_ids"], kv.token_ids)
    keys = tensors["keys"] if "keys" in tensors else [tensors["keys.0"]]
    assert keys[0].dtype == kv.keys[0].dtype
    assert keys[0].shape == kv.keys[0].shape


@pytest.mark.parametrize("more_heads", [0, 1])
def test_the_code_in_the_format_page_reads_an_entry(tmp_path: Path, more_heads: int) -> None:
    kv = make_kv(more_heads=more_heads, dtype=torch.bfloat16)
    path = tmp_path / "entry.safetensors"
    path.write_bytes(to_bytes(kv))
    about, token_ids, keys, values = documented("read_block")(path)
    read = BlockKV(
        tuple(keys), tuple(values), token_ids,
        about["fingerprint"], about["digest"], about["handle"],
    )  # fmt: skip
    assert same(read, kv)
    assert documented("is_whole")(path)


def test_the_code_in_the_format_page_sees_damage(tmp_path: Path) -> None:
    path = tmp_path / "entry.safetensors"
    content = bytearray(to_bytes(make_kv()))
    content[-1] ^= 1
    path.write_bytes(content)
    assert not documented("is_whole")(path)


def test_every_flipped_bit_is_detected() -> None:
    content = to_bytes(golden_kv())
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            with pytest.raises(FormatError):
                from_bytes(damaged)


def test_every_truncation_is_detected() -> None:
    content = to_bytes(golden_kv())
    for length in range(len(content)):
        with pytest.raises(FormatError):
            from_bytes(content[:length])


@given(st.binary(min_size=1, max_size=20))
@settings(deadline=None)
def test_bytes_after_the_end_are_detected(more: bytes) -> None:
    with pytest.raises(FormatError, match="checksum"):
        from_bytes(to_bytes(golden_kv()) + more)


def test_another_format_version_is_named_as_such() -> None:
    content = to_bytes(golden_kv()).replace(b'"version":"1"', b'"version":"2"')
    with pytest.raises(FormatError, match="format version '2'; this package reads '1'"):
        from_bytes(content)


def test_a_foreign_safetensors_file_is_named_as_such() -> None:
    content = safetensors_torch.save({"weights": torch.zeros(200)})
    with pytest.raises(FormatError, match=r"does not start as a blockattn_rag\.kv entry"):
        from_bytes(content)


def resealed(fields: Any, content: bytes = GOLDEN) -> bytes:
    """An entry with another header and a right checksum, as only a hostile writer makes it."""
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.dumps(fields, separators=(",", ":")).encode()
    forgery = bytearray(len(head).to_bytes(8, "little") + head + content[end:])
    forgery[entry._CHECKSUM] = b"0" * 32
    forgery[entry._CHECKSUM] = xxhash.xxh3_128_hexdigest(bytes(forgery)).encode()
    return bytes(forgery)


def fields_of(content: bytes = GOLDEN) -> Any:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def refused(content: bytes, message: str) -> None:
    """Reading the entry says why it cannot be used; so does its header alone, if that is wrong."""
    with pytest.raises(FormatError, match=message):
        from_bytes(content)
    with pytest.raises(FormatError, match=message):
        read_header(io.BytesIO(content), len(content))


KEYS = {"dtype": "F32", "shape": [1, 1, 2, 2], "data_offsets": [16, 32]}


@pytest.mark.parametrize(
    "spec",
    [
        KEYS | {"data_offsets": [16, 9999]},
        KEYS | {"data_offsets": [17, 33]},
        KEYS | {"data_offsets": [16]},
        KEYS | {"data_offsets": [16.0, 32.0]},
        KEYS | {"data_offsets": [-16, 0]},
        KEYS | {"shape": [1, 1, 2, 9]},
        KEYS | {"shape": "wide"},
        KEYS | {"shape": []},
        KEYS | {"shape": [4]},
        KEYS | {"shape": [2, 2]},
        KEYS | {"shape": [1, 2, 2]},
        KEYS | {"shape": [1, 1, 1, 2, 2]},
        KEYS | {"shape": [2, 1, 2, 1]},
        KEYS | {"shape": [1, 1, 4, 1]},
        KEYS | {"shape": [1, 2, 2, 1]},
        KEYS | {"shape": [1, 1, -2, -2]},
        KEYS | {"shape": [True, True, 2, 2]},
        KEYS | {"shape": [[[1]], 1, 2, 2]},
        KEYS | {"shape": [10**30, 1, 2, 0]},
        KEYS | {"shape": [0, 1, 2, 2], "data_offsets": [16, 16]},
        KEYS | {"dtype": "F31"},
        KEYS | {"dtype": ["F32"]},
        KEYS | {"dtype": "I64", "shape": [1, 1, 2, 1]},
        KEYS | {"dtype": "I32"},
        {"dtype": "F32"},
        [],
        None,
    ],
)
def test_a_header_that_lies_about_its_data_is_refused(spec: object) -> None:
    refused(resealed(fields_of() | {"keys": spec}), "header cannot be read")


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}},
        {"token_ids": {"dtype": "I64", "shape": [2, 1], "data_offsets": [0, 16]}},
        {"token_ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}},
        {"more": {"dtype": "F32", "shape": [0], "data_offsets": [40, 40]}},
        {"keys.0": {"dtype": "F32", "shape": [1, 2, 1], "data_offsets": [40, 48]}},
        {"keys.x": KEYS},
    ],
)
def test_other_tensors_than_those_of_a_block_are_refused(change: dict[str, Any]) -> None:
    content = resealed(fields_of() | change, GOLDEN + bytes(8))
    refused(content, "header cannot be read")


def test_a_header_without_token_ids_or_of_no_dictionary_is_refused() -> None:
    fields = fields_of()
    del fields["token_ids"]
    refused(resealed(fields), "header cannot be read")


@pytest.mark.parametrize("name", ["fingerprint", "digest", "handle"])
@pytest.mark.parametrize("value", [["a list"], {"a": 1}, None, 7, True, "\ud800", [[[["deep"]]]]])
def test_names_that_are_no_text_are_refused(name: str, value: object) -> None:
    fields = fields_of()
    fields["__metadata__"][name] = value
    refused(resealed(fields), "header cannot be read")


def test_a_file_longer_than_its_header_says_is_refused() -> None:
    refused(resealed(fields_of(), GOLDEN + bytes(8)), r"tells of \d+ bytes, it has \d+")


def test_a_header_as_long_as_a_book_is_not_even_read() -> None:
    content = ((1 << 20) + 1).to_bytes(8, "little") + GOLDEN[8:]
    with pytest.raises(FormatError, match="its header would have 1048577 bytes"):
        read_header(io.BytesIO(content), 1 << 40)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("more_heads", [0, 1])
def test_what_is_not_finite_is_found_with_a_right_checksum(
    value: float, name: str, dtype: torch.dtype, more_heads: int
) -> None:
    kv = make_kv(dtype=dtype, more_heads=more_heads)
    layers = getattr(kv, name)
    spoilt = layers[-1].float().clone()
    spoilt[-1, -1, -1] = value
    change: dict[str, Any] = {name: (*layers[:-1], spoilt.to(dtype))}
    spoilt_kv = replace(kv, **change)
    assert is_finite(kv)
    assert not is_finite(spoilt_kv)
    with pytest.raises(FormatError, match=rf"its {name}.* hold NaN or infinity"):
        from_bytes(to_bytes(spoilt_kv))


def test_a_negative_token_id_is_found_with_a_right_checksum() -> None:
    kv = replace(golden_kv(), token_ids=torch.tensor([7, -1]))
    with pytest.raises(FormatError, match="token id -1"):
        from_bytes(to_bytes(kv))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 50)
    | st.floats()
    | st.text(st.characters(), max_size=4)  # with halves of surrogate pairs
    | st.sampled_from(["F32", "I64", "keys", "token_ids"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value, but for the start of the header."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in inner:
        if key not in ("__metadata__", "format", "version", "xxh3_128"):
            found.append((*path, key))
        if isinstance(item, dict | list):
            found += places(item, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """An entry with a right checksum, some places of whose header were changed or dropped."""
    fields = fields_of()
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(fields)))
        parent = fields
        for key in path:
            parent = parent[key]
        if draw(st.booleans()) and isinstance(parent, dict):
            del parent[last]
        else:
            parent[last] = draw(JSON)
    return resealed(fields)


@given(mutated())
@settings(deadline=None, max_examples=400)
def test_a_changed_header_with_a_right_checksum_gives_a_block_or_is_refused(content: bytes) -> None:
    with contextlib.suppress(FormatError):
        header = read_header(io.BytesIO(content), len(content))
        assert header.num_tokens > 0
        store_key(header.fingerprint, header.digest)
        hash(header.handle)
    with contextlib.suppress(FormatError):
        kv = from_bytes(content)
        check_storable(kv)
        assert is_finite(kv)
        assert kv.token_ids.min() >= 0


@given(st.binary(max_size=60), st.integers(0, 400))
@settings(deadline=None)
def test_reading_a_damaged_header_never_fails_in_another_way(junk: bytes, at: int) -> None:
    content = bytearray(to_bytes(golden_kv()))
    content[at : at + len(junk)] = junk
    with contextlib.suppress(FormatError):
        read_header(io.BytesIO(content), len(content))


def test_a_deeply_nested_header_is_refused() -> None:
    content = bytearray(to_bytes(golden_kv())[: entry._CHECKSUM.stop])
    content += b'","x":' + b"[" * 100_000
    content[:8] = (len(content) - 8).to_bytes(8, "little")
    with pytest.raises(FormatError, match="cannot be read"):
        read_header(io.BytesIO(content), len(content))


def test_our_names_of_dtypes_are_those_of_the_safetensors_library() -> None:
    assert DTYPES.items() <= safetensors_torch._TYPES.items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": (), "values": ()}, "at least one; found 0 and 0"),
        ({"values": ()}, "found 2 and 0"),
        ({"token_ids": torch.zeros(0, dtype=torch.int64)}, r"found torch.int64 \[0\]"),
        ({"token_ids": torch.zeros(3, dtype=torch.int32)}, r"found torch.int32 \[3\]"),
        ({"token_ids": torch.zeros(4, dtype=torch.int64)}, r"4 tokens, .* found \[2, 3, 4\]"),
        ({"keys": (torch.zeros(3, 4),) * 2}, r"found \[3, 4\]"),
        ({"values": (torch.zeros(2, 3, 0),) * 2}, r"found \[2, 3, 0\]"),
        ({"values": (torch.zeros(2, 3, 4, dtype=torch.complex128),) * 2}, "complex128"),
        ({"keys": (torch.zeros(2, 3, 4, dtype=torch.int8),) * 2}, "floating-point.*int8"),
        ({"values": (torch.zeros(1, 3, 4),) * 2}, "found 2 and 1 in layer 0"),
        ({"handle": "\ud800"}, "surrogates not allowed"),
        ({"handle": ["a list"]}, "must be text, found .*a list"),
    ],
)
def test_what_is_no_blocks_kv_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_storable(replace(make_kv(), **change))
