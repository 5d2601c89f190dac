"""ModelProfile: everything that a server needs to know about a model, in a small JSON file.

A server does not load the model with transformers, and its engine stores the weights in another
form. So ``blockattn-rag check --profile`` measures the model once, and writes the result to a file.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from blockattn_rag.errors import ProtocolError, ServingError
from blockattn_rag.files import write_json
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.kv.rope import RotaryLayout
from blockattn_rag.server.fields import (
    hex_digest,
    one_of,
    record,
    sequence,
    shown,
    sink_name,
    text,
    whole,
)

VERSION = 1

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Supported dtypes of keys and values, by name."""

_MOST_LAYERS = 4096
_MOST_SIZE = 1 << 16
_MOST_TOKENS = 1 << 30
_PAIRINGS = ("half", "interleaved")


class LayerProfile(NamedTuple):
    """Key-value heads of a layer, their sizes, and the index of its ``ModelProfile.rotary``."""

    kv_heads: int
    key_size: int
    value_size: int
    rotary: int


class Rotary(NamedTuple):
    """A ``kv.RotaryLayout``: pairing, and float32 frequencies in radians per position."""

    pairing: Literal["half", "interleaved"]
    frequencies: tuple[float, ...]


@dataclass(frozen=True)  # without slots, because of the cached property
class ModelProfile:
    """What a server needs to know about a model to load and store its blocks.

    Args:
        fingerprint: ``BlockModel.fingerprint``, part of every store key.
        tokenizer: ``BlockTokenizer.fingerprint``.
        name: Name of the model when it was measured.
        dtype: Dtype of keys and values, one of ``DTYPES``.
        layers: Sizes of each layer.
        rotary: Distinct rotary layouts of the layers.
        vocab_size: Upper bound of token ids.
        max_positions: Maximum tokens of a prompt and its answer with exact keys.
        sink: Sink of all context blocks except the first, as in ``prompts.sinks``.
        sink_ids: Token ids of the sink.
        block_tuned: Whether the model is known to be block-fine-tuned.

    Raises:
        ProtocolError: A field is invalid.
    """

    fingerprint: str
    tokenizer: str
    name: str
    dtype: str
    layers: tuple[LayerProfile, ...]
    rotary: tuple[Rotary, ...]
    vocab_size: int
    max_positions: int
    sink: str = "none"
    sink_ids: tuple[int, ...] = ()
    block_tuned: bool = False

    def __post_init__(self) -> None:
        for name in ("fingerprint", "tokenizer"):
            hex_digest(getattr(self, name), name)
        text(self.name, "name", ".*", "a text")
        one_of(self.dtype, "dtype", DTYPES)
        _set(self, "rotary", tuple(_rotary(*each) for each in _listed(self.rotary, "rotary")))
        layers = _listed(self.layers, "layers")
        _set(self, "layers", tuple(_layer(self.rotary, *each) for each in layers))
        whole(self.vocab_size, "vocab_size", 1)
        whole(self.max_positions, "max_positions", 1)
        sink_name(self.sink)
        ids = sequence(self.sink_ids, "sink_ids", 0, _MOST_TOKENS)
        _set(self, "sink_ids", tuple(whole(n, "sink_ids", 0, self.vocab_size - 1) for n in ids))
        if (self.sink == "none") != (not ids):
            raise ProtocolError(f"found sink={self.sink!r} and {len(ids)} sink_ids, which disagree")
        if type(self.block_tuned) is not bool:
            raise ProtocolError(f"block_tuned must be true or false, found {self.block_tuned!r}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @cached_property
    def layouts(self) -> tuple[RotaryLayout, ...]:
        """Rotary layout of each layer; equal layouts are one object."""
        found = [RotaryLayout(torch.tensor(one.frequencies), one.pairing) for one in self.rotary]
        return tuple(found[layer.rotary] for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values, not quantized."""
        sizes = (layer.kv_heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return sum(sizes) * self.torch_dtype.itemsize

    def block_bytes(self, tokens: int, kv_dtype: KVDtype = "model") -> int:
        """Bytes of a block's keys and values, including scales."""
        if kv_dtype == "model":
            return tokens * self.bytes_per_token
        numbers = tokens * self.bytes_per_token // self.torch_dtype.itemsize
        scales = sum(layer.kv_heads * (layer.key_size + tokens) for layer in self.layers)
        return numbers * torch.int8.itemsize + scales * torch.float32.itemsize

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        told = asdict(self)
        told["layers"] = [layer._asdict() for layer in self.layers]
        told["rotary"] = [rotary._asdict() for rotary in self.rotary]
        return {"version": VERSION, **told}

    @classmethod
    def from_dict(cls, told: object) -> ModelProfile:
        """Parse a JSON object. Raises ProtocolError, also for another version."""
        version = told.get("version") if isinstance(told, dict) else None
        if isinstance(told, dict) and (type(version) is not int or version != VERSION):
            raise ProtocolError(
                f"found version {shown(version)} of profiles, expected {VERSION}; make a new one"
            )
        fields = dict(record(told, "a profile", ("version", *cls.__dataclass_fields__)))
        del fields["version"]
        for name, kind in (("layers", LayerProfile), ("rotary", Rotary)):
            items = _listed(fields[name], name)
            names = kind._fields
            told_of = [record(one, f"{name}[{i}]", names) for i, one in enumerate(items)]
            fields[name] = tuple(tuple(one[field] for field in names) for one in told_of)
        return cls(**fields)

    @classmethod
    def read(cls, path: str | Path) -> ModelProfile:
        """Read a profile from a file. Raises ServingError if it has none."""
        try:
            return cls.from_dict(json.loads(Path(path).read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ServingError(
                f"cannot read a model's profile from {path}: {why}; make one with `blockattn-rag "
                f"check MODEL --profile {path}`"
            ) from error

    def write(self, path: str | Path) -> None:
        """Write the profile to a file, atomically. Raises OSError."""
        write_json(Path(path), self.to_dict())


def _listed(value: object, name: str) -> list[Any] | tuple[Any, ...]:
    return sequence(value, name, 1, _MOST_LAYERS)


def _rotary(pairing: object, frequencies: object) -> Rotary:
    one_of(pairing, "pairing", _PAIRINGS)
    found = sequence(frequencies, "frequencies", 0, _MOST_SIZE)
    numbers = torch.tensor([n if type(n) is float else math.nan for n in found])
    if not numbers.isfinite().all() or numbers.tolist() != list(found):
        raise ProtocolError(f"frequencies must be finite float32 numbers, found {shown(found)}")
    return Rotary(pairing, tuple(found))  # type: ignore[arg-type]


def _layer(
    rotary: tuple[Rotary, ...],
    kv_heads: object,
    key_size: object,
    value_size: object,
    place: object,
) -> LayerProfile:
    heads = whole(kv_heads, "kv_heads", 1, _MOST_SIZE)
    keys, values = (whole(n, "a head's size", 1, _MOST_SIZE) for n in (key_size, value_size))
    layer = LayerProfile(heads, keys, values, whole(place, "rotary", 0, len(rotary) - 1))
    if 2 * len(rotary[layer.rotary].frequencies) > layer.key_size:
        raise ProtocolError(
            f"found {len(rotary[layer.rotary].frequencies)} frequencies for heads of "
            f"{layer.key_size} keys, expected at most one for two"
        )
    return layer


def _set(profile: ModelProfile, name: str, value: object) -> None:
    object.__setattr__(profile, name, value)
