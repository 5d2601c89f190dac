"""Published block-fine-tuned models as data: the prompt format and the switches each was made for.

Nothing is loaded or asked for here: a model is known by its hub id, or by a folder that is plainly
a copy of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockattn_rag.prompts.formats import (
    CHAT,
    KVLINK,
    KVLINK_LINKS,
    LLAMA3_BLOCK,
    TULU3_BLOCK,
    PromptFormat,
    prompt_format,
)
from blockattn_rag.prompts.sinks import NO_SINK

AUTO = "auto"
"""The name that stands for a known checkpoint's own prompt format, and for ``chat`` elsewhere."""

# The command line shows what this logger says as a note.
logger = logging.getLogger("blockattn_rag.app.rag")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published model that was fine-tuned on blocks, or a control of such a model.

    Args:
        hub_id: its name on the Hugging Face hub.
        base: the model it was tuned from.
        licence: its hub tag, or its base's where no tag was seen.
        prompt: the format it was trained on; None where no source gives its text.
        confirmed: whether the format's text was read in the authors' own code.
        block_tuned: False for a control that was trained on the format in full mode.
        positions, sink: how blocks were encoded in training; see ``BlockAttentionEngine``.
        link_tokens: tokens after each passage that attend to everything before them; 0 for none.
        bos: whether its prompts open with the tokenizer's BOS token.
        note: what else a user should know.
    """

    hub_id: str
    base: str
    licence: str
    prompt: PromptFormat | None
    confirmed: bool = True
    block_tuned: bool = True
    positions: str = "reordered"
    sink: str = NO_SINK
    link_tokens: int = 0
    bos: bool = True
    note: str = ""

    def unmet(self, positions: str, sink: str) -> str:
        """What block mode with these switches lacks of what the model was made for: one sentence,
        or nothing."""
        if self.link_tokens:
            return (
                f"{self.hub_id} was trained with {self.link_tokens} link tokens after each "
                "passage, which attend to everything before them; block mode does not compute them "
                "yet, so its answers will be worse than published; use mode='full'"
            )
        trained = self.switches if self.block_tuned else {}
        return other_switches(self.hub_id, trained, {"positions": positions, "sink": sink})

    @property
    def switches(self) -> dict[str, str]:
        """The options of block mode that it was trained with."""
        return {"positions": self.positions, "sink": self.sink}


def other_switches(model: str, trained: Mapping[str, str], found: Mapping[str, str]) -> str:
    """How options of block mode differ from those that a model was trained with: one sentence, or
    nothing. What training does not tell may be anything."""
    if all(found[name] == value for name, value in trained.items()):
        return ""
    with_, other = (
        " and ".join(f"{name}={options[name]!r}" for name in trained)
        for options in (trained, found)
    )
    return f"{model} was trained with {with_}, found {other}: block mode will be less accurate"


_TULU3 = "allenai/Llama-3.1-Tulu-3-8B-SFT"
_LLAMA_3_1, _LLAMA_3_2 = "Llama 3.1 community (base's)", "Llama 3.2 community (base's)"

CHECKPOINTS: dict[str, Checkpoint] = {
    one.hub_id: one
    for one in (
        Checkpoint(
            "ldsjmdy/Tulu3-Block-FT",
            base=_TULU3,
            licence=_LLAMA_3_1,
            prompt=TULU3_BLOCK,
            bos=False,
            note="Trained on ten passages, best first; block-mode samples of its training began "
            'with "[Block-Attention]", which the authors\' inference leaves out.',
        ),
        Checkpoint(
            "ldsjmdy/Tulu3-RAG",
            base=_TULU3,
            licence=_LLAMA_3_1,
            prompt=TULU3_BLOCK,
            block_tuned=False,
            bos=False,
            note="The control of Tulu3-Block-FT: the same data in full mode.",
        ),
        Checkpoint(
            "hxia7/Llama-3.2-1B-Block-FT",
            base="meta-llama/Llama-3.2-1B",
            licence=_LLAMA_3_2,
            prompt=LLAMA3_BLOCK,
            note="80,000 samples.",
        ),
        Checkpoint(
            "hxia7/Llama-3.1-8B-Block-FT",
            base="meta-llama/Llama-3.1-8B",
            licence=_LLAMA_3_1,
            prompt=LLAMA3_BLOCK,
            confirmed=False,
            note="8,000 samples; its card shows no evaluation.",
        ),
        Checkpoint(
            "hxia7/Llama-3-8B-block",
            base="meta-llama/Meta-Llama-3-8B",
            licence="Llama 3 community (base's)",
            prompt=LLAMA3_BLOCK,
            note="An older model of the same author.",
        ),
        Checkpoint(
            "hxia7/Qwen3-8B-Block-FT",
            base="Qwen/Qwen3-8B",
            licence="apache-2.0",
            prompt=None,
            confirmed=False,
            note="8,000 samples; look its prompt up on its card.",
        ),
        *(
            Checkpoint(
                f"Shiyu-Lab/Llama{size}-KVLink5",
                base=f"meta-llama/Llama-3.2-{size}-Instruct",
                licence=licence,
                prompt=KVLINK,
                link_tokens=KVLINK_LINKS,
                note="Full mode only. Its training data have the question in a turn of its own and "
                "other system messages than its evaluation, which the format follows.",
            )
            for size, licence in (("1B", "llama3.2"), ("3B", _LLAMA_3_2))
        ),
    )
}
"""The models that are known, by hub id."""

_BY_LOWER_ID = {hub_id.lower(): one for hub_id, one in CHECKPOINTS.items()}


def known_checkpoint(model: str) -> Checkpoint | None:
    """The checkpoint behind a hub id or a path, or None.

    Of paths, snapshots in the hub's cache (``models--OWNER--NAME/snapshots/REVISION``) and folders
    ``OWNER/NAME`` are known. Other folders are not, even if they bear the model's name: they may
    hold a fine-tune by somebody else. Upper and lower case are alike, as on the hub.
    """
    *_, owner, name, last = ("", "", "", *Path(model).parts)
    hub_id = f"{name}/{last}"
    if name == "snapshots" and owner.startswith("models--"):
        hub_id = owner.removeprefix("models--").replace("--", "/")
    return _BY_LOWER_ID.get(hub_id.lower())


def format_for(wanted: str | PromptFormat, model: str) -> PromptFormat:
    """The prompt format to use with a model: as wanted, or by the model's name if ``"auto"``.

    Args:
        wanted: a format, its name, or ``"auto"``: a known checkpoint's own format, else ``chat``.
        model: hub id, path or other name of the model.

    What was chosen for a known checkpoint is logged in one line.

    Raises:
        ValueError: an unknown format.
    """
    if wanted != AUTO:
        return prompt_format(wanted)
    known = known_checkpoint(model)
    if known is None:
        return CHAT
    chosen = known.prompt or CHAT
    if known.prompt is None:
        why = "the one it was trained on is not known here; see its card"
    elif known.confirmed:
        why = "the one it was trained on"
    else:
        why = "the one it was trained on as far as is known (unconfirmed); see its card"
    logger.warning("%s: prompt format %s, %s", known.hub_id, chosen.name, why)
    return chosen
