"""Block-mode settings that a model was fine-tuned with."""

from __future__ import annotations

from typing import Any

from blockattn_rag.prompts.checkpoints import Checkpoint, known_checkpoint


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
        """Published block-fine-tuned checkpoint with this name. None after further fine-tuning."""
        marker = getattr(self.config, "block_attention", None)
        return None if marker or self.has_adapter else known_checkpoint(self.name)

    @property
    def has_adapter(self) -> bool:
        return False
