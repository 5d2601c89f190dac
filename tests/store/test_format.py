"""The bytes of an entry: round trip, golden bytes, damage, and the documented reader."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import torch as safetensors_torch

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.quantization import KVScales
from blockattn_rag.store.checks import DTYPES, check_entry, is_finite
from blockattn_rag.store.format import decode, encode
from blockattn_rag.store.header import FormatError, LayerShape, Layout, read_header, share_of
from tests.store.kvs import kvs, make_kv, quantized_kvs, same

FORMAT_PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def from_bytes(content: bytes | bytearray) -> BlockKV:
    kv = decode(torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)))
    assert kv is not None
    return kv


def documented(name: str) -> Any:
    """Return a function that is defined in docs/format.md."""
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
        digest="tokens",
        handle="passage",
        namespace="tenant",
    )


GOLDEN_METADATA = {
    "format": "blockattn_rag.kv",
    "version": "3",
    "fingerprint": "model",
    "digest": "tokens",
    "handle": "passage",
    "namespace": "tenant",
    "kv_dtype": "model",
    "dtype": "F32",
    "layers": "0",
    "token_ids": "12826ffa95628ad8b89f0c75cc898e2b",
    "head.0000.keys.00": "2babafcad3709c7ce3b3073547aa9dc3",
    "head.0000.values.00": "618f47100aced03bb5483e625dd91e2a",
    "header": "e7c34d792c6743d5a4d0732f9fd594e0",
}
GOLDEN_TENSORS = {
    "token_ids": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
    "head.0000.keys.00": {"dtype": "F32", "shape": [1, 2, 2], "data_offsets": [16, 32]},
    "head.0000.values.00": {"dtype": "F32", "shape": [1, 2, 1], "data_offsets": [32, 40]},
}
GOLDEN_DATA = bytes.fromhex(
    "0700000000000000 02010000000000000000803f 00000040 00004040 00008040000080bf 0000003f"
)


def golden_int8() -> BlockKV:
    """Two layers, two heads, one token, two key channels and one value channel."""
    codes = [torch.tensor([[[n, -n]], [[n + 1, -n - 1]]], dtype=torch.int8) for n in (1, 3)]
    scales = [torch.tensor([[[n, n]], [[n, n]]]) for n in (0.5, 2.0)]
    return BlockKV(
        keys=tuple(codes),
        values=tuple(code[..., :1] + 100 for code in codes),
        token_ids=torch.tensor([7]),
        fingerprint="model",
        digest="tokens",
        handle="passage",
        scales=KVScales(
            tuple(scales), tuple(scale[..., :1] * -1 for scale in scales), torch.bfloat16
        ),
    )


GOLDEN_INT8_DATA = bytes.fromhex(
    "0700000000000000"
    # Head 0, then head 1: key scales of both layers, then value scales.
    "0000003f 0000003f 00000040 00000040  000000bf 000000c0"
    "0000003f 0000003f 00000040 00000040  000000bf 000000c0"
    # Head 0, then head 1: keys, then values.
    "01ff 03fd  65 67  02fe 04fc  66 68"
)


@given(kvs() | quantized_kvs())
@settings(deadline=None)
def test_decode_returns_the_encoded_block(kv: BlockKV) -> None:
    decoded = from_bytes(encode(kv))
    assert same(decoded, kv)
    for layer in range(kv.num_layers):
        for actual, expected in zip(decoded.states(layer), kv.states(layer), strict=True):
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def test_the_golden_entry_is_encoded_and_decoded() -> None:
    content = encode(golden_kv())
    assert fields_of(content) == {"__metadata__": GOLDEN_METADATA, **GOLDEN_TENSORS}
    assert content.endswith(GOLDEN_DATA)
    assert same(from_bytes(golden()), golden_kv())


def test_the_golden_int8_entry_is_encoded_and_decoded() -> None:
    content = encode(golden_int8())
    end = 8 + int.from_bytes(content[:8], "little")
    assert content[end:] == GOLDEN_INT8_DATA
    about = fields_of(content)["__metadata__"]
    assert (about["kv_dtype"], about["dtype"], about["layers"]) == ("int8", "BF16", "0,0")
    assert about["header"] == "cffae90a51703abe613eacc9e266c8e5"


@pytest.mark.parametrize("head_dim", [3, 4])
def test_decoded_states_are_contiguous_views(head_dim: int) -> None:
    for kv in (make_kv(head_dim=head_dim), make_kv(head_dim=head_dim, quantized=True)):
        raw = torch.frombuffer(bytearray(encode(kv)), dtype=torch.uint8)
        found = decode(raw)
        assert found is not None
        for states in (*found.keys, *found.values):
            assert states.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
            assert all(head.is_contiguous() for head in states)
        assert found.token_ids.untyped_storage().nbytes() == kv.token_ids.nbytes


def test_decode_reads_unaligned_bytes() -> None:
    for kv in (make_kv(), make_kv(more_heads=1), make_kv(quantized=True)):
        raw = torch.frombuffer(bytearray(b"x" + encode(kv)), dtype=torch.uint8)
        assert same(decode(raw[1:]), kv)


def test_encode_accepts_non_contiguous_tensors() -> None:
    kv = make_kv()
    transposed = replace(kv, keys=tuple(k.mT.contiguous().mT for k in kv.keys))
    assert same(from_bytes(encode(transposed)), kv)


@given(kvs() | quantized_kvs())
@settings(deadline=None)
def test_header_describes_the_block_within_its_size_limit(kv: BlockKV) -> None:
    content, layout = encode(kv), Layout.of(kv)
    header = read_header(io.BytesIO(content), len(content))
    assert header.layout == layout
    assert int.from_bytes(content[:8], "little") + 8 <= layout.most_header_bytes
    assert (header.kv_dtype, header.key) == ("model" if kv.scales is None else "int8", kv.key)


def test_header_of_an_8b_model_is_small() -> None:
    kv = make_kv(layers=32, heads=8, tokens=4, head_dim=128, dtype=torch.bfloat16)
    assert Layout.of(kv).most_header_bytes < 8 << 10


@pytest.mark.parametrize("more_heads", [0, 1])
@pytest.mark.parametrize("quantized", [False, True])
def test_documented_code_reads_entry(tmp_path: Path, more_heads: int, quantized: bool) -> None:
    kv = make_kv(more_heads=more_heads, dtype=torch.bfloat16, quantized=quantized)
    path = tmp_path / "entry.safetensors"
    path.write_bytes(encode(kv))
    about, token_ids, found = documented("read_block")(path)
    states = {kind: tuple(torch.stack(list(one)) for one in found[kind]) for kind in found}
    scales = KVScales(
        tuple(scale[:, None] for scale in states["key_scales"]),
        tuple(scale[..., None] for scale in states["value_scales"]),
        DTYPES[about["dtype"]],
    )
    read = BlockKV(
        states["keys"], states["values"], token_ids,
        about["fingerprint"], about["digest"], about["handle"],
        scales=scales if about["kv_dtype"] == "int8" else None, namespace=about["namespace"],
    )  # fmt: skip
    assert same(read, kv)
    assert documented("is_whole")(path)


def test_documented_code_detects_damage(tmp_path: Path) -> None:
    path = tmp_path / "entry.safetensors"
    content = encode(make_kv(quantized=True))
    end = 8 + int.from_bytes(content[:8], "little")
    for position in (end - 1, end, end + 40, len(content) - 1):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        assert not documented("is_whole")(path)
    path.write_bytes(content + b"more")
    assert not documented("is_whole")(path)


def test_every_flipped_bit_is_detected() -> None:
    content = encode(golden_kv())
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            with pytest.raises(FormatError):
                decode(torch.frombuffer(damaged, dtype=torch.uint8))


def test_every_truncation_is_detected() -> None:
    content = encode(golden_kv())
    for length in range(len(content)):
        with pytest.raises(FormatError):
            from_bytes(content[:length])


@given(st.binary(min_size=1, max_size=20))
@settings(deadline=None)
def test_extra_bytes_are_detected(more: bytes) -> None:
    with pytest.raises(FormatError, match=r"describes \d+ bytes, found \d+"):
        from_bytes(encode(golden_kv()) + more)


@pytest.mark.parametrize("version", ["2", "4"])
def test_another_format_version_is_named(version: str) -> None:
    content = encode(golden_kv()).replace(b'"version":"3"', f'"version":"{version}"'.encode())
    with pytest.raises(FormatError, match=rf"format version '{version}'; this package reads '3'$"):
        from_bytes(content)


def test_foreign_safetensors_file_is_refused() -> None:
    content = safetensors_torch.save({"weights": torch.zeros(200)})
    with pytest.raises(FormatError, match=r"is not a blockattn_rag\.kv entry"):
        from_bytes(content)


def resealed(fields: Any, data: bytes = GOLDEN_DATA) -> bytes:
    """Return an entry with a different header and correct checksums, as from an attacker."""
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        about = {name: text for name, text in fields["__metadata__"].items() if name != "header"}
        tensors = {name: field for name, field in fields.items() if name != "__metadata__"}
        shapes = {name: [field["dtype"], *field["shape"]] for name, field in tensors.items()}
        sealed = json.dumps([about, shapes], sort_keys=True, separators=(",", ":")).encode()
        about["header"] = xxhash.xxh3_128_hexdigest(sealed)
        fields = {"__metadata__": about, **tensors}
    head = json.dumps(fields, separators=(",", ":")).encode()
    return len(head).to_bytes(8, "little") + head + data


def fields_of(content: bytes) -> Any:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def golden(**metadata: Any) -> bytes:
    return resealed({"__metadata__": {**GOLDEN_METADATA, **metadata}, **GOLDEN_TENSORS})


def refused(content: bytes, message: str) -> None:
    """Check that reading the entry, and reading only its header, raise this error."""
    with pytest.raises(FormatError, match=message):
        from_bytes(content)
    with pytest.raises(FormatError, match=message):
        read_header(io.BytesIO(content), len(content))


KEYS = {"dtype": "F32", "shape": [1, 2, 2], "data_offsets": [16, 32]}

TOKENS = {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": TOKENS | {"dtype": "F64"}},
        {"token_ids": TOKENS | {"shape": [2, 1]}},
        {"token_ids": TOKENS | {"shape": [1], "data_offsets": [0, 8]}},
        {"token_ids": TOKENS | {"shape": [0], "data_offsets": [0, 0]}},
        {"more": {"dtype": "F32", "shape": [0], "data_offsets": [40, 40]}},
        {"head.0000.keys.01": {"dtype": "F32", "shape": [1, 2, 1], "data_offsets": [40, 48]}},
        {"head.0001.keys.00": {"dtype": "F32", "shape": [1, 2, 1], "data_offsets": [40, 48]}},
        {"head.x.keys": KEYS},
    ],
)
def test_header_with_other_tensors_is_refused(change: dict[str, Any]) -> None:
    content = resealed(fields_of(golden()) | change, GOLDEN_DATA + bytes(8))
    refused(content, "header cannot be read")


@pytest.mark.parametrize(
    "spec",
    [
        KEYS | {"shape": [1, 2] + [9] * 1_000_000},  # computing the product would take minutes
        KEYS | {"data_offsets": [16, 9999]},
        KEYS | {"data_offsets": [17, 33]},
        KEYS | {"data_offsets": [16]},
        KEYS | {"data_offsets": [16.0, 32.0]},
        KEYS | {"data_offsets": [-16, 0]},
        KEYS | {"shape": [1, 2, 9]},
        KEYS | {"shape": "wide"},
        KEYS | {"shape": []},
        KEYS | {"shape": [2, 2]},
        KEYS | {"shape": [1, 1, 2, 2]},
        KEYS | {"shape": [1, 4, 1]},
        KEYS | {"shape": [1, -2, -2]},
        KEYS | {"shape": [True, 2, 2]},
        KEYS | {"shape": [[[1]], 2, 2]},
        KEYS | {"shape": [10**30, 2, 2]},
        KEYS | {"shape": [0, 2, 2], "data_offsets": [16, 16]},
        KEYS | {"dtype": "F31"},
        KEYS | {"dtype": ["F32"]},
        KEYS | {"dtype": "I64", "shape": [1, 2, 1]},
        KEYS | {"dtype": "I8", "shape": [1, 2, 8]},
        KEYS | {"more": 1},
        {"dtype": "F32"},
        [],
        None,
    ],
)
def test_header_with_a_wrong_tensor_spec_is_refused(spec: object) -> None:
    refused(resealed(fields_of(golden()) | {"head.0000.keys.00": spec}), "header cannot be read")


@pytest.mark.parametrize(
    "change",
    [
        {"kv_dtype": "int8"},
        {"kv_dtype": "int4"},
        {"dtype": "F16"},
        {"dtype": "I8"},
        {"layers": ""},
        {"layers": "1"},
        {"layers": "0,0"},
        {"layers": ",".join(["0"] * 5000)},
        {"layers": "-1"},
        {"token_ids": 7},
    ],
)
def test_metadata_that_contradicts_the_tensors_is_refused(change: dict[str, Any]) -> None:
    refused(golden(**change), "header")


def test_header_with_a_wrong_checksum_is_refused() -> None:
    fields = fields_of(golden())
    fields["__metadata__"]["handle"] = "another"
    head = json.dumps(fields).encode()
    content = len(head).to_bytes(8, "little") + head + GOLDEN_DATA
    refused(content, "its header is damaged: its checksum does not match")


def test_duplicate_tensor_name_is_refused() -> None:
    content = golden()
    head = content[8 : -len(GOLDEN_DATA)].replace(b'{"__meta', b'{"token_ids":{},"__meta')
    refused(len(head).to_bytes(8, "little") + head + GOLDEN_DATA, "Found a duplicate name")


def test_encode_refuses_long_names() -> None:
    with pytest.raises(ValueError, match="take 2083 bytes together"):
        encode(replace(golden_kv(), fingerprint="f" * 2000))


@pytest.mark.parametrize("name", ["fingerprint", "digest", "handle", "namespace"])
@pytest.mark.parametrize("value", [["a list"], {"a": 1}, None, 7, True, "\ud800", [[[["deep"]]]]])
def test_names_that_are_not_text_are_refused(name: str, value: object) -> None:
    refused(golden(**{name: value}), "header cannot be read")


def test_oversized_header_is_not_read() -> None:
    content = ((1 << 22) + 1).to_bytes(8, "little") + golden()[8:]
    with pytest.raises(FormatError, match="found a header of 4194305 bytes"):
        read_header(io.BytesIO(content), 1 << 40)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("more_heads", [0, 1])
def test_non_finite_states_are_refused(
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
    with pytest.raises(FormatError, match=rf"its head\.\d+\.{name}.* contains NaN or infinity"):
        from_bytes(encode(spoilt_kv))


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("of_keys", [True, False])
def test_non_finite_scales_are_refused(scale: float, of_keys: bool) -> None:
    kv = make_kv(quantized=True)
    assert kv.scales is not None
    scales = kv.scales.keys if of_keys else kv.scales.values
    scales[1][1, 0, 0] = scale
    assert not is_finite(kv)
    with pytest.raises(FormatError, match=r"scales.*(NaN|too large for torch\.float32)"):
        from_bytes(encode(kv))


def test_negative_token_id_is_refused() -> None:
    kv = replace(golden_kv(), token_ids=torch.tensor([7, -1]))
    with pytest.raises(FormatError, match="token id -1"):
        from_bytes(encode(kv))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 50)
    | st.floats()
    | st.text(st.characters(), max_size=4)  # including lone surrogates
    | st.sampled_from(["F32", "I64", "I8", "int8", "head.0000.keys.00", "token_ids"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all items in a JSON value, except those needed to recognize an entry."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in inner:
        if key not in ("__metadata__", "format", "version", "header"):
            found.append((*path, key))
        if isinstance(item, dict | list):
            found += places(item, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Entries with a correct checksum whose headers have changed or missing items."""
    fields = fields_of(golden())
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
def test_resealed_header_gives_a_valid_block_or_an_error(content: bytes) -> None:
    with contextlib.suppress(FormatError):
        header = read_header(io.BytesIO(content), len(content))
        assert header.num_tokens > 0
        assert len(header.key) == 64
        hash(header.handle)
    with contextlib.suppress(FormatError):
        kv = from_bytes(content)
        check_entry(kv.key, kv)
        assert is_finite(kv)
        assert kv.token_ids.min() >= 0


def test_deeply_nested_header_is_refused() -> None:
    head = golden()[8:40] + b'","x":' + b"[" * 100_000
    content = len(head).to_bytes(8, "little") + head
    with pytest.raises(FormatError, match="cannot be read"):
        read_header(io.BytesIO(content), len(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": (), "values": ()}, "same number of key and value layers, .*; found 0 and 0"),
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
        ({"scales": KVScales((), (), torch.float32)}, "Quantized .* must be int8; found .*float32"),
        ({"handle": ["a list"]}, "must be strings, found .*a list"),
    ],
)
def test_malformed_blocks_are_refused(change: dict[str, Any], message: str) -> None:
    kv = make_kv()
    with pytest.raises(ValueError, match=message):
        check_entry(kv.key, replace(kv, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "floating-point dtype.*int8"),
        ({"scales": KVScales((), (), torch.float32)}, "needs float32 scales in each layer"),
        ({"keys": (torch.zeros(2, 3, 5, dtype=torch.int8),) * 2}, "needs float32 scales"),
        ({"keys": (torch.zeros(2, 3, 4),) * 2}, "Quantized .* must be int8; found torch.float32"),
        ({"scales": torch.int32}, r"Cannot dequantize to torch\.int32"),
    ],
)
def test_invalid_int8_blocks_are_refused(change: dict[str, Any], message: str) -> None:
    kv = make_kv(quantized=True)
    check_entry(kv.key, kv)
    if change.get("scales") is torch.int32:
        change = {"scales": replace(kv.scales, dtype=torch.int32)}  # type: ignore[type-var]
    with pytest.raises(ValueError, match=message):
        check_entry(kv.key, replace(kv, **change))


WIDE = LayerShape(4, 8, 8, torch.float32, torch.float32)
NARROW = LayerShape(2, 16, 4, torch.float32, torch.float32)


def test_layers_with_equal_shapes_form_a_group() -> None:
    layout = Layout(3, (WIDE, NARROW, WIDE, WIDE, NARROW))
    assert layout.groups == ((WIDE, (0, 2, 3)), (NARROW, (1, 4)))
    assert len(layout.tensors) == 1 + 2 * 4 + 2 * 2
    assert layout.tensors["head.0003.keys.00"] == (torch.float32, (3, 3, 8))
    assert layout.tensors["head.0001.values.01"] == (torch.float32, (2, 3, 4))
    assert "head.0002.values.01" not in layout.tensors
    assert len(Layout(3, (WIDE,) * 100).tensors) == len(Layout(3, (WIDE,)).tensors)


@pytest.mark.parametrize(("rank", "ranks", "count"), [(2, 2, 4), (-1, 2, 4), (0, 0, 4), (0, 1, 0)])
def test_share_of_refuses_invalid_ranks(rank: int, ranks: int, count: int) -> None:
    with pytest.raises(ValueError, match="Expected a rank from 0"):
        share_of(rank, ranks, count)
