"""Properties of models that are derived from their config and files, without loading weights."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model.fingerprint import fingerprint_of_weights
from blockattn_rag.model.loading import (
    commit_of,
    is_adapter,
    load_config,
    load_tokenizer,
    resolve_name,
    weight_files,
)
from blockattn_rag.model.miniature import profile_config
from blockattn_rag.model.multimodal import keep_settings, text_class
from blockattn_rag.model.probe import AttentionProfile
from blockattn_rag.prompts.checkpoints import Checkpoint, known_checkpoint
from blockattn_rag.prompts.tokenization import BlockTokenizer


class TunedModel:
    """Base class of ``BlockModel`` and ``CheckpointModel`` that reads fine-tuning settings from a
    model's config and name."""

    name: str
    config: Any

    @property
    def is_block_tuned(self) -> bool:
        """Whether the model is known to have been fine-tuned with the block mask."""
        marker, known = getattr(self.config, "block_attention", None), self.checkpoint
        return bool(marker) or (known is not None and known.block_tuned)

    @property
    def tuned_with(self) -> dict[str, str]:
        """Block-mode options (``positions``, ``sink``) that the model was fine-tuned with. Unknown
        options are omitted."""
        marker, known = getattr(self.config, "block_attention", None), self.checkpoint
        if isinstance(marker, dict):
            return {name: marker[name] for name in ("positions", "sink") if marker.get(name)}
        return known.switches if known else {}

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Known checkpoint with this name. None for other names, and after further fine-tuning."""
        marker = getattr(self.config, "block_attention", None)
        return None if marker or self.has_adapter else known_checkpoint(self.name)

    @property
    def has_adapter(self) -> bool:
        return False


class CheckpointModel(TunedModel):
    """Model that another program runs in ``dtype``. Its weights are hashed but not loaded.

    Its fingerprint equals that of a ``BlockModel`` loaded from the same files in the same dtype.
    Raises ``OSError`` if the files cannot be found or downloaded, and ``UnsupportedModelError`` for
    a LoRA adapter, or if block mode does not support the architecture.
    """

    def __init__(self, model: str | Path, dtype: torch.dtype, revision: str | None = None) -> None:
        self.name = str(model)
        self.dtype = dtype
        if is_adapter(resolve_name(model)):
            raise UnsupportedModelError(
                f"{model} is a LoRA adapter, expected a complete model: merge it into its base"
            )
        self.commit = commit_of(model, revision)
        self.config = _as_loaded(load_config(model, revision=self.commit))
        self.tokenizer = BlockTokenizer(load_tokenizer(model, revision=self.commit))
        self.profile: AttentionProfile = profile_config(self.config, dtype)

    @property
    def vocabulary_size(self) -> int:
        return int(self.config.get_text_config(decoder=True).vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """See ``BlockModel.fingerprint``. The first access hashes the weight files, unless their
        digests are cached."""
        files = weight_files(self.name, self.commit)
        if files is None:
            raise UnsupportedModelError(
                f"{self.name} has no weight files with a supported name: expected "
                "model.safetensors or pytorch_model.bin, or an index of several such files"
            )
        return fingerprint_of_weights(
            files.digests(), self.config, self.dtype, self.tokenizer, self.profile.kinds
        )


def _as_loaded(config: Any) -> Any:
    """Config that the model has after loading. For a multimodal model, this is the language model's
    config if transformers has a class for the language model."""
    text = config.get_text_config(decoder=True)
    loads_text = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_alone = getattr(loads_text, "config_class", None) is type(text) or text_class(text)
    if text is config or not is_alone:
        return config
    keep_settings(config, text)
    return text
