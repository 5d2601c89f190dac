"""Profiles: the model properties that a server needs.

A server does not load the model with transformers. Each of its processes builds the same profile
from the checkpoint's files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from blockattn_rag.engine.find_recipe import AnyModel, check_fits
from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.kv.rope import Pairing, RotaryLayout
from blockattn_rag.model.kinds import storing, summary
from blockattn_rag.model.recompute import tokens_to_recompute
from blockattn_rag.prompts.sinks import NO_SINK, sink_ids
from blockattn_rag.server.plan import BlockPlan

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Supported dtypes of keys and values, by name."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Properties of a layer with stored keys and values.

    Args:
        kv_heads: Number of key-value heads.
        key_size, value_size: Sizes of a head's key and value. For a latent layer, sizes of the
            rotary key and the latent.
        rotary: Index of the layer's rotary layout in ``ModelProfile.rotary``.
        index: Index of the layer in the model.
    """

    kv_heads: int
    key_size: int
    value_size: int
    rotary: int
    index: int
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class Rotary:
    """Hashable ``kv.RotaryLayout``, with float32 frequencies in radians per position."""

    pairing: Pairing
    frequencies: tuple[float, ...]


@dataclass(frozen=True)  # Slots would not allow the cached property.
class ModelProfile:
    """Properties that a server needs to load and store a model's blocks.

    Args:
        fingerprint: ``BlockModel.fingerprint``, part of every store key.
        tokenizer: ``BlockTokenizer.fingerprint``.
        name: Name of the model.
        dtype: Dtype of keys and values, one of ``DTYPES``.
        layers: Layers that store keys and values.
        hidden_layers: Total number of layers, including layers that share keys and values.
        vocab_size: Upper bound of token ids.
        max_positions: Maximum number of tokens, prompt and answer together, for which keys are
            exact.
        adapter: Digest of the adapter that is applied to blocks. Empty: no adapter.
        block_tuned: Whether the model is marked as block-fine-tuned.
    """

    fingerprint: str
    tokenizer: str
    name: str
    dtype: str
    layers: tuple[LayerProfile, ...]
    rotary: tuple[Rotary, ...]
    hidden_layers: int
    vocab_size: int
    max_positions: int
    sink: str = NO_SINK
    sink_ids: tuple[int, ...] = ()
    adapter: str = ""
    promote: int = 0
    recompute: float = 0.0
    block_tuned: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def recipe(self) -> RecipeOutline:
        return RecipeOutline(self.sink, self.adapter, self.promote, self.recompute)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def recomputed_tokens(self, plan: BlockPlan) -> int:
        """Number of tokens to recompute for a prompt."""
        return tokens_to_recompute(plan.lengths, plan.may_change, self.recompute)

    @cached_property
    def layouts(self) -> tuple[RotaryLayout, ...]:
        found = [
            RotaryLayout(torch.tensor(rotary.frequencies), rotary.pairing) for rotary in self.rotary
        ]
        return tuple(found[layer.rotary] for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Unquantized size of one token's keys and values, in bytes."""
        sizes = (layer.kv_heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return sum(sizes) * self.torch_dtype.itemsize

    def block_bytes(self, tokens: int, kv_dtype: KVDtype = "model") -> int:
        """Return the size of a block's keys, values and scales, in bytes."""
        if kv_dtype == "model":
            return tokens * self.bytes_per_token
        numbers = tokens * self.bytes_per_token // self.torch_dtype.itemsize
        scales = sum(layer.kv_heads * (layer.key_size + tokens) for layer in self.layers)
        return numbers * torch.int8.itemsize + scales * torch.float32.itemsize


def profile_of(model: AnyModel, recipe: Recipe | None = None) -> ModelProfile:
    """Build the profile of a model. Reads all weights, or their files, to compute the fingerprint.

    Args:
        recipe: Recipe of block mode. Default: the settings of the model's block fine-tuning, or no
            sink.
    """
    if recipe is None:
        trained: dict[str, Any] = {**model.tuned_with}
        recipe = Recipe(**trained)
    check_fits(recipe, model)
    if recipe.positions != "reordered":
        raise ValueError(
            f"Recipe {recipe} is not supported, because a server rotates keys to their positions "
            "in the prompt; pass a recipe with positions='reordered'"
        )
    attention = model.profile
    if attention.has_states:
        raise UnsupportedModelError(
            f"{model.name} has layers with a recurrent state ({summary(attention.kinds)}), which "
            "block mode supports in process, but not on a server"
        )
    kinds = {kind for _, _, kind in attention.token_outline}
    names = [name for name, dtype in DTYPES.items() if kinds == {dtype}]
    if not names:
        raise UnsupportedModelError(
            f"{model.name} has keys and values of dtype {', '.join(sorted(map(str, kinds)))}, "
            f"expected one of {', '.join(DTYPES)}; load the model with one of these dtypes"
        )
    rotary: list[RotaryLayout] = []
    for layout in attention.layouts:
        if not any(layout is known for known in rotary):
            rotary.append(layout)
    places = {id(layout): place for place, layout in enumerate(rotary)}
    layers = tuple(
        LayerProfile(
            *(keys.heads, keys.size, values.size, places[id(layout)], index),
            is_latent=attention.kinds[index].attention == "latent",
        )
        for (keys, values), layout, index in zip(
            attention.layer_outlines, attention.layouts, storing(attention.kinds), strict=True
        )
    )
    return ModelProfile(
        fingerprint=model.fingerprint,
        tokenizer=model.tokenizer.fingerprint,
        name=model.name,
        dtype=names[0],
        layers=layers,
        rotary=tuple(
            Rotary(layout.pairing, tuple(layout.frequencies.tolist())) for layout in rotary
        ),
        # A cache may omit layers that share keys and values.
        hidden_layers=int(model.config.get_text_config(decoder=True).num_hidden_layers),
        vocab_size=model.vocabulary_size,
        max_positions=attention.max_context_tokens,
        sink=recipe.sink,
        sink_ids=tuple(sink_ids(recipe.sink, model.tokenizer)),
        adapter=recipe.encoding[1],
        promote=recipe.promote,
        recompute=recipe.recompute,
        block_tuned=model.is_block_tuned,
    )
