"""Small models with layers of every kind, and their logits and answers."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig

from blockattn_rag.kv.context import Context
from blockattn_rag.model import BlockModel
from blockattn_rag.model.miniature import miniature
from blockattn_rag.model.sampling import Sampling
from tests.model.families import KINDS
from tests.models import tiny_model, tiny_tokenizer

ASSEMBLIES: tuple[Literal["relay", "copy"], ...] = ("relay", "copy")


def new_model(name: str) -> BlockModel:
    """Create a new model for a name in ``KINDS``."""
    family, settings, _ = KINDS[name]
    hf_model = miniature(AutoConfig.for_model(family, **settings))
    hf_model.config.eos_token_id = hf_model.generation_config.eos_token_id = 257
    hf_model.generation_config.pad_token_id = 258
    return BlockModel(hf_model, tiny_tokenizer(), name=name, pack_weights=False)


model_of_kinds = cache(new_model)


def new_llama(**config: Any) -> BlockModel:
    return BlockModel(tiny_model("llama", **config), tiny_tokenizer())


def logits_after(
    model: BlockModel,
    context: Context,
    final_ids: list[int],
    assembly: Literal["relay", "copy"] = "copy",
) -> Tensor:
    """Logits after a final block that follows a context."""
    cache = model.cache_for(context, assembly=assembly)
    return model.next_logits(torch.tensor([final_ids]), cache)


def answers(
    model: BlockModel, context: Context, final_ids: list[int], sampling: Sampling
) -> list[list[int]]:
    """Answers to a final block that follows a context, for each of ``ASSEMBLIES``."""
    caches = [model.cache_for(context, assembly=assembly) for assembly in ASSEMBLIES]
    prompt = context.token_ids, final_ids, sampling
    return [model.generate(*prompt, cache=cache) for cache in caches]
