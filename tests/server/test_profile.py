"""Profiles: read as they were written, and refused with a reason where they are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.errors import ProtocolError, ServingError
from blockattn_rag.server.profile import LayerProfile, ModelProfile, Rotary
from tests.server.profiles import SINK_IDS, make_profile

PROFILE = make_profile(sink_ids=SINK_IDS, vocab_size=1000)


def changed(**fields: Any) -> dict[str, Any]:
    """What the profile tells, with other fields."""
    return json.loads(json.dumps(PROFILE.to_dict())) | fields  # type: ignore[no-any-return]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=4),
    st.sampled_from(["half", "interleaved"]),
)
def test_a_profile_is_read_as_it_was_told_to_the_last_bit(
    frequencies: list[float], pairing: Any
) -> None:
    profile = ModelProfile(
        fingerprint="0" * 64,
        tokenizer="1" * 64,
        name="a name\nof two lines",
        dtype="bfloat16",
        layers=(LayerProfile(2, 8, 6, 1), LayerProfile(1, 8, 8, 0)),
        rotary=(Rotary("half", ()), Rotary(pairing, tuple(frequencies))),
        vocab_size=10,
        max_positions=20,
    )
    again = ModelProfile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert again == profile
    rotating, still = again.layouts
    assert (rotating.pairing, rotating.rotates) == (pairing, bool(frequencies))
    assert torch.equal(rotating.frequencies, torch.tensor(frequencies, dtype=torch.float32))
    assert not still.rotates
    assert again.bytes_per_token == 2 * (2 * (8 + 6) + 1 * (8 + 8))
    assert again.block_bytes(5) == 5 * again.bytes_per_token
    scales = 2 * (8 + 5) + 1 * (8 + 5)  # of each head: one for a channel of keys, and for a token
    assert again.block_bytes(5, "int8") == 5 * again.bytes_per_token // 2 + 4 * scales


def test_a_file_holds_a_profile(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "model.json")
    assert ModelProfile.read(tmp_path / "model.json") == PROFILE
    assert PROFILE.torch_dtype == torch.float32
    assert PROFILE.num_layers == 2


def test_layers_that_rotate_alike_share_one_layout() -> None:
    assert len({id(layout) for layout in PROFILE.layouts}) == 1


@pytest.mark.parametrize("content", [None, b"", b"[" * 10**5, b"{}", b"\xff", b'{"version": 2}'])
def test_a_file_that_holds_none_says_how_to_make_one(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServingError, match=r"model.json: .*check MODEL --profile") as caught:
        ModelProfile.read(path)
    assert "None" not in str(caught.value).replace("found version None", "")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": 2}, "found version 2 of profiles, expected 1"),
        ({"version": True}, "found version True"),
        ({"windows": []}, "unknown field 'windows'"),
        ({"fingerprint": "F" * 64}, "fingerprint must be 64 hex digits"),
        ({"tokenizer": None}, "tokenizer must be 64 hex digits"),
        ({"dtype": "int8"}, "dtype must be one of float32"),
        ({"layers": []}, "layers must have 1 to 4096 items"),
        ({"layers": [[2, 4, 4, 0]]}, r"layers\[0\] must be an object"),
        ({"rotary": []}, "rotary must have 1"),
        ({"rotary": [{"pairing": "half"}]}, r"rotary\[0\] must have the fields"),
        ({"rotary": [{"pairing": "both", "frequencies": []}]}, "pairing must be one of"),
        ({"rotary": [{"pairing": "half", "frequencies": [0.1]}]}, "float32 numbers"),
        ({"rotary": [{"pairing": "half", "frequencies": [1]}]}, "float32 numbers"),
        ({"rotary": [{"pairing": "half", "frequencies": [1e300]}]}, "finite"),
        ({"rotary": [{"pairing": "half", "frequencies": [float("inf")]}]}, "finite"),
        ({"rotary": [{"pairing": "half", "frequencies": [1.0] * 3}]}, "found 3 frequencies"),
        ({"vocab_size": 0}, "vocab_size must be a whole number at least 1"),
        ({"sink": "head 2"}, "sink must be a sink such as"),
        ({"sink": "none"}, "found sink='none' and 2 sink_ids, which disagree"),
        ({"sink_ids": []}, "found sink='head:2' and 0 sink_ids"),
        ({"sink_ids": [1000, 1]}, "sink_ids must be a whole number from 0 to 999, found 1000"),
        ({"block_tuned": 1}, "block_tuned must be true or false"),
    ],
)
def test_what_is_no_profile_is_refused_with_a_reason(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        ModelProfile.from_dict(changed(**fields))


@pytest.mark.parametrize(
    ("field", "value"), [("kv_heads", 0), ("key_size", True), ("value_size", "4"), ("rotary", 1)]
)
def test_a_layer_s_numbers_are_within_bounds(field: str, value: object) -> None:
    told = changed()
    told["layers"][1][field] = value
    with pytest.raises(ProtocolError, match="must be a whole number"):
        ModelProfile.from_dict(told)


def test_a_profile_lacks_no_field() -> None:
    for name in changed():
        told = changed()
        del told[name]
        with pytest.raises(ProtocolError):
            ModelProfile.from_dict(told)
