"""ModelProfile: everything that a server needs to know about a model, in a small JSON file.

A server does not load the model with transformers, and its engine stores the weights in another
form. So ``blockattn-rag check --profile`` measures the model once, and writes the result to a file.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, StrictBool, field_validator, model_validator
from pydantic.dataclasses import dataclass

from blockattn_rag.engine.find_recipe import check_fits
from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import ServingError, UnsupportedModelError
from blockattn_rag.files import write_json
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.kv.rope import RotaryLayout
from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.probe import StateOutline, vocabulary_size
from blockattn_rag.prompts.sinks import NO_SINK, sink_ids
from blockattn_rag.server.validation import (
    STRICT,
    AdapterDigest,
    Count,
    Digest,
    Positive,
    SinkName,
    check_version,
    parse,
    shown,
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

_Size = Annotated[int, Field(strict=True, ge=1, le=_MOST_SIZE)]


@dataclass(config=STRICT, frozen=True, slots=True)
class LayerProfile:
    """Key-value heads of a layer, their sizes, and the layer's index in ``ModelProfile.rotary``."""

    kv_heads: _Size
    key_size: _Size
    value_size: _Size
    rotary: Count

    def outlines(self, dtype: torch.dtype) -> tuple[StateOutline, StateOutline]:
        sizes = (self.key_size, self.value_size)
        keys, values = (StateOutline(self.kv_heads, size, dtype) for size in sizes)
        return keys, values


@dataclass(config=STRICT, frozen=True, slots=True)
class Rotary:
    """JSON form of a ``kv.RotaryLayout``: pairing, and float32 frequencies in radians per
    position."""

    pairing: Literal["half", "interleaved"]
    frequencies: Annotated[
        tuple[Annotated[float, Field(strict=True, allow_inf_nan=False)], ...],
        Field(max_length=_MOST_SIZE),
    ]

    @field_validator("frequencies")
    @classmethod
    def _is_float32(cls, frequencies: tuple[float, ...]) -> tuple[float, ...]:
        if tuple(torch.tensor(frequencies, dtype=torch.float32).tolist()) != frequencies:
            raise ValueError(f"expected float32 numbers, found {shown(frequencies)}")
        return frequencies


@dataclass(config=STRICT, frozen=True)  # without slots, because of the cached property
class ModelProfile:
    """Properties of a model that a server needs to load and store its blocks.

    Args:
        fingerprint: ``BlockModel.fingerprint``, part of every store key.
        tokenizer: ``BlockTokenizer.fingerprint``.
        name: Name of the model when it was measured.
        dtype: Dtype of keys and values, one of ``DTYPES``.
        vocab_size: Upper bound of token ids.
        max_positions: Maximum tokens of a prompt and its answer for which keys are exact.
        adapter: Digest of the adapter that is applied to these blocks; empty if there is none.
        block_tuned: Whether the model is known to be block-fine-tuned.
    """

    fingerprint: Digest
    tokenizer: Digest
    name: str
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    layers: Annotated[tuple[LayerProfile, ...], Field(min_length=1, max_length=_MOST_LAYERS)]
    rotary: Annotated[tuple[Rotary, ...], Field(min_length=1, max_length=_MOST_LAYERS)]
    vocab_size: Positive
    max_positions: Positive
    sink: SinkName = NO_SINK
    sink_ids: tuple[Count, ...] = ()
    adapter: AdapterDigest = ""
    promote: Count = 0
    block_tuned: StrictBool = False

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.sink == NO_SINK) != (not self.sink_ids):
            raise ValueError(
                f"found sink={self.sink!r} and {len(self.sink_ids)} sink_ids, which disagree"
            )
        if self.sink_ids and max(self.sink_ids) >= self.vocab_size:
            raise ValueError(
                f"found sink_ids {shown(self.sink_ids)}, expected less than {self.vocab_size}"
            )
        for layer in self.layers:
            if layer.rotary >= len(self.rotary):
                raise ValueError(
                    f"found rotary {layer.rotary}, expected less than {len(self.rotary)}"
                )
            frequencies = len(self.rotary[layer.rotary].frequencies)
            if 2 * frequencies > layer.key_size:
                raise ValueError(
                    f"found {frequencies} frequencies for heads of {layer.key_size} keys, expected "
                    "at most one per two keys"
                )
        return self

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def recipe(self) -> RecipeOutline:
        return RecipeOutline(self.sink, self.adapter, self.promote)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @cached_property
    def layouts(self) -> tuple[RotaryLayout, ...]:
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

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise ServingError if the profile was not written with this recipe."""
        found = []
        if recipe.outline != self.recipe:
            found.append(f"{recipe}, expected {self.recipe}")
        if recipe.fingerprints and self.fingerprint not in recipe.fingerprints:
            found.append(f"fingerprints {recipe.fingerprints}, expected {self.fingerprint!r}")
        try:
            if recipe.adapter is not None:
                recipe.adapter.check_shapes(
                    [layer.outlines(self.torch_dtype) for layer in self.layers]
                )
        except ValueError as error:
            found.append(str(error).rstrip("."))
        if found:
            raise ServingError(
                f"The recipe {recipe.source or recipe} is not the one that the profile of "
                f"{self.name} was written with: found {'; '.join(found)}. Write the profile with "
                "`blockattn-rag check MODEL --recipe FOLDER --profile FILE`"
            )

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: object) -> ModelProfile:
        """Parse a JSON object. Raises ProtocolError, also for another version."""
        return parse(cls, check_version(value, "version", VERSION, "a profile"), "profile")

    @classmethod
    def read(cls, path: str | Path) -> ModelProfile:
        """Read a profile from a file. Raises ServingError if the file has no valid profile."""
        try:
            return cls.from_dict(json.loads(Path(path).read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ServingError(
                f"Cannot read a model's profile from {path}: {why}; make one with `blockattn-rag "
                f"check MODEL --profile {path}`"
            ) from error

    def write(self, path: str | Path) -> None:
        write_json(Path(path), self.to_dict())


def profile_of(model: BlockModel, recipe: Recipe | None = None) -> ModelProfile:
    """Measure the profile of a model. Reads all weights, for ``BlockModel.fingerprint``.

    Args:
        recipe: How block mode runs. Default: as the model was block-fine-tuned, or without sink.
    """
    if recipe is None:
        trained: dict[str, Any] = {**model.tuned_with}
        recipe = Recipe(**trained)
    check_fits(recipe, model)
    if recipe.positions != "reordered":
        raise ValueError(
            f"Found recipe {recipe}, but a server rotates keys to their positions in the prompt; "
            "pass a recipe with positions='reordered'"
        )
    if recipe.recompute:
        raise ValueError(
            f"Found recipe {recipe}, but a server cannot recompute tokens of passages; pass a "
            "recipe with recompute=0, for example with promote=1"
        )
    with model.lock:  # the fingerprint may measure the layouts again
        fingerprint, attention = model.fingerprint, model.profile
    if other := {str(kind) for kind in attention.kinds if not kind.is_attention}:
        raise UnsupportedModelError(
            f"{model.name} has layers of other kinds than attention ({', '.join(sorted(other))}), "
            "which block mode supports in this process, but not on a server"
        )
    kinds = {kind for _, _, kind in attention.token_outline}
    names = [name for name, dtype in DTYPES.items() if kinds == {dtype}]
    if not names:
        raise UnsupportedModelError(
            f"{model.name} has keys and values of {', '.join(sorted(map(str, kinds)))}, expected "
            f"one of {', '.join(DTYPES)}; load the model with a dtype"
        )
    rotary: list[RotaryLayout] = []
    for layout in attention.layouts:
        if not any(layout is known for known in rotary):
            rotary.append(layout)
    places = {id(layout): place for place, layout in enumerate(rotary)}
    layers = tuple(
        LayerProfile(keys.heads, keys.size, values.size, places[id(layout)])
        for (keys, values), layout in zip(attention.layer_outlines, attention.layouts, strict=True)
    )
    return ModelProfile(
        fingerprint=fingerprint,
        tokenizer=model.tokenizer.fingerprint,
        name=model.name,
        dtype=names[0],
        layers=layers,
        rotary=tuple(Rotary(one.pairing, tuple(one.frequencies.tolist())) for one in rotary),
        vocab_size=vocabulary_size(model.hf_model),
        max_positions=model.max_context_tokens,
        sink=recipe.sink,
        sink_ids=tuple(sink_ids(recipe.sink, model.tokenizer)),
        adapter=recipe.encoding[1],
        promote=recipe.promote,
        block_tuned=model.is_block_tuned,
    )
