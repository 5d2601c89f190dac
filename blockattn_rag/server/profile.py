"""Profiles: the model properties that a server needs.

A server does not load the model with transformers. Each of its processes builds the same profile
from the checkpoint's files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from blockattn_rag.engine.find_recipe import AnyModel, check_fits
from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.kv.rope import RotaryLayout
from blockattn_rag.model.kinds import storing, summary
from blockattn_rag.model.recompute import tokens_to_recompute
from blockattn_rag.prompts.sinks import sink_ids
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
        key_size, value_size: Sizes of a head's key and value. For a latent layer, sizes of the
            rotary key and the latent.
        layout: Rotary layout of the keys. Not compared by ``==``.
        index: Index of the layer in the model.
    """

    kv_heads: int
    key_size: int
    value_size: int
    layout: RotaryLayout = field(compare=False)
    index: int
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Properties that a server needs to load and store a model's blocks.

    Args:
        fingerprint: ``BlockModel.fingerprint``, part of every store key.
        tokenizer: ``BlockTokenizer.fingerprint``.
        dtype: Dtype of keys and values, one of ``DTYPES``.
        layers: Layers that store keys and values.
        hidden_layers: Total number of layers, including layers that share keys and values.
        vocab_size: Size of the vocabulary. All token ids are smaller.
        max_positions: Maximum number of tokens, prompt and answer together, for which keys are
            exact.
        block_tuned: Whether the model is marked as block-fine-tuned.
    """

    fingerprint: str
    tokenizer: str
    name: str
    dtype: torch.dtype
    layers: tuple[LayerProfile, ...]
    hidden_layers: int
    vocab_size: int
    max_positions: int
    recipe: RecipeOutline
    sink_ids: tuple[int, ...] = ()
    block_tuned: bool = False

    def recomputed_tokens(self, plan: BlockPlan) -> int:
        return tokens_to_recompute(plan.lengths, plan.may_change, self.recipe.recompute)

    @property
    def bytes_per_token(self) -> int:
        """Unquantized size of one token's keys and values, in bytes."""
        sizes = (layer.kv_heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return sum(sizes) * self.dtype.itemsize

    def block_bytes(self, tokens: int, kv_dtype: KVDtype = "model") -> int:
        if kv_dtype == "model":
            return tokens * self.bytes_per_token
        numbers = tokens * self.bytes_per_token // self.dtype.itemsize
        scales = sum(layer.kv_heads * (layer.key_size + tokens) for layer in self.layers)
        return numbers * torch.int8.itemsize + scales * torch.float32.itemsize


def profile_of(model: AnyModel, recipe: Recipe | None = None) -> ModelProfile:
    """Build the profile of a model. Reads all weights, or their files, to compute the fingerprint.
    Default recipe: the options that the model was fine-tuned with, or an empty recipe."""
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
    if len(kinds) != 1 or not kinds <= {*DTYPES.values()}:
        raise UnsupportedModelError(
            f"{model.name} has keys and values of dtype {', '.join(sorted(map(str, kinds)))}, "
            f"expected one of {', '.join(DTYPES)}; load the model with one of these dtypes"
        )
    layers = tuple(
        LayerProfile(
            *(keys.heads, keys.size, values.size, layout, index),
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
        dtype=kinds.pop(),
        layers=layers,
        # A cache may omit layers that share keys and values.
        hidden_layers=int(model.config.get_text_config(decoder=True).num_hidden_layers),
        vocab_size=model.vocabulary_size,
        max_positions=attention.max_context_tokens,
        recipe=recipe.outline,
        sink_ids=tuple(sink_ids(recipe.sink, model.tokenizer)),
        block_tuned=model.is_block_tuned,
    )
