"""How a model was fine-tuned for block mode."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from blockattn_rag.prompts.checkpoints import Checkpoint, known_checkpoint


class TunedModel:
    """Base of ``BlockModel``: what its config and its name say about fine-tuning."""

    hf_model: PreTrainedModel
    name: str

    @property
    def config(self) -> Any:
        return self.hf_model.config

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
        """Published block-fine-tuned checkpoint of this name; None if fine-tuned further."""
        marker = getattr(self.config, "block_attention", None)
        is_tuned = marker or hasattr(self.hf_model, "peft_config")
        return None if is_tuned else known_checkpoint(self.name)
