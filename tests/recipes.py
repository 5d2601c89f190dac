"""Recipes with random adapters, for tiny models."""

from __future__ import annotations

from typing import Any

import torch

from blockattn_rag import Recipe
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import NUM_PLACES, Correction, LayerCorrection


def correction_of(model: BlockModel, *, sink: str = "none", size: float = 0.1) -> Correction:
    """Return a random correction for a model. A larger ``size`` changes answers more."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return size * torch.randn(*shape, generator=generator)

    layers = []
    for keys, values in model.profile.layer_outlines:
        both = keys.size + values.size
        weight, bias = random(keys.heads, both, both), random(keys.heads, NUM_PLACES, both)
        layers.append(LayerCorrection(weight, bias))
    return Correction(tuple(layers), sink, model.fingerprint)


def recipe_of(
    model: BlockModel, *, sink: str = "head:4", size: float = 0.1, **fields: Any
) -> Recipe:
    """Return a recipe with a random correction for a model."""
    adapter = correction_of(model, sink=sink, size=size)
    known = {"fingerprints": (model.fingerprint,), "model": model.name}
    return Recipe(**{"sink": sink, "adapter": adapter, **known, **fields})
