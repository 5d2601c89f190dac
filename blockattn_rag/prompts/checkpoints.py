"""Known block-fine-tuned checkpoints with their prompt formats and settings.

Models are recognized by hub id, or by the path of a local copy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockattn_rag.prompts.formats import CHAT, PromptFormat, prompt_format
from blockattn_rag.prompts.sinks import NO_SINK

AUTO_FORMAT = "auto"
"""Name for the format that a known checkpoint was trained with, or ``chat`` for other models."""

# The command line shows this logger's warnings as notes.
logger = logging.getLogger("blockattn_rag.app.rag")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published block-fine-tuned model, or a control model that was trained in full mode.

    Args:
        hub_id: Name on the Hugging Face hub.
        format: Name of the prompt format used in training. None: the format is not published.
        confirmed: Whether the format comes from the authors' own code.
        block_tuned: Whether the model was trained in block mode. False for control models.
        bos: Whether prompts start with the tokenizer's BOS token.
    """

    hub_id: str
    format: str | None
    confirmed: bool = True
    block_tuned: bool = True
    bos: bool = True

    @property
    def switches(self) -> dict[str, str]:
        """Block-mode options that the model was trained with. Empty for control models."""
        return {"positions": "reordered", "sink": NO_SINK} if self.block_tuned else {}


def other_switches(model: str, trained: Mapping[str, str], used: Mapping[str, str]) -> str:
    """Warning about options that differ from those in training. Empty if all options match."""
    if all(used[name] == value for name, value in trained.items()):
        return ""
    with_, other = (
        " and ".join(f"{name}={options[name]!r}" for name in trained) for options in (trained, used)
    )
    return f"{model} was trained with {with_}, found {other}: block mode will be less accurate"


CHECKPOINTS: dict[str, Checkpoint] = {
    checkpoint.hub_id: checkpoint
    for checkpoint in (
        # Trained on ten passages, best first. Block-mode samples began with "[Block-Attention]",
        # which the authors' inference code leaves out.
        Checkpoint("ldsjmdy/Tulu3-Block-FT", "tulu3-block", bos=False),
        # Control of Tulu3-Block-FT, trained on the same data in full mode.
        Checkpoint("ldsjmdy/Tulu3-RAG", "tulu3-block", block_tuned=False, bos=False),
        Checkpoint("hxia7/Llama-3.2-1B-Block-FT", "llama3-block"),
        Checkpoint("hxia7/Llama-3.1-8B-Block-FT", "llama3-block", confirmed=False),
        Checkpoint("hxia7/Llama-3-8B-block", "llama3-block"),
        Checkpoint("hxia7/Qwen3-8B-Block-FT", None, confirmed=False),
    )
}
"""Known checkpoints by hub id."""


def known_checkpoint(model: str) -> Checkpoint | None:
    """Find a known checkpoint by hub id or path, or return None. Ignores case, like the hub.

    Recognizes snapshots in the hub's cache (``models--OWNER--NAME/snapshots/REVISION``) and folders
    ``OWNER/NAME``, but no other folders named ``NAME``, which may contain a fine-tuned copy.
    """
    *_, owner, name, last = ("", "", "", *Path(model).parts)
    hub_id = f"{name}/{last}"
    if name == "snapshots" and owner.startswith("models--"):
        hub_id = owner.removeprefix("models--").replace("--", "/")
    matches = (known for known in CHECKPOINTS.values() if known.hub_id.lower() == hub_id.lower())
    return next(matches, None)


def format_for(name: str | PromptFormat, model: str) -> PromptFormat:
    """Choose a model's prompt format. For known checkpoints, the choice of ``"auto"`` is logged.

    Args:
        name: A format, its name, or ``"auto"``: a known checkpoint's format, otherwise ``chat``.
        model: Hub id, path or other name of the model.

    Raises:
        ValueError: The format is unknown.
    """
    if name != AUTO_FORMAT:
        return prompt_format(name)
    known = known_checkpoint(model)
    if known is None:
        return CHAT
    chosen = prompt_format(known.format or CHAT)
    if known.format is None:
        why = "because the format that it was trained with is unknown; see its model card"
    elif known.confirmed:
        why = "which it was trained with"
    else:
        why = "which it was probably trained with (unconfirmed); see its model card"
    logger.warning("%s: prompt format %s, %s", known.hub_id, chosen.name, why)
    return chosen
