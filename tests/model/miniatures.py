"""Small models with layers of every kind."""

from __future__ import annotations

from functools import cache

from transformers import AutoConfig

from blockattn_rag.model import BlockModel
from blockattn_rag.model.miniature import miniature
from tests.model.families import KINDS
from tests.models import tiny_tokenizer


def new_model(name: str) -> BlockModel:
    """Create a new model for a name in ``KINDS``."""
    family, settings, _ = KINDS[name]
    hf_model = miniature(AutoConfig.for_model(family, **settings))
    hf_model.config.eos_token_id = hf_model.generation_config.eos_token_id = 257
    hf_model.generation_config.pad_token_id = 258
    return BlockModel(hf_model, tiny_tokenizer(), name=name, pack_weights=False)


model_of_kinds = cache(new_model)
