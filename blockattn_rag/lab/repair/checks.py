"""What is checked before a repair starts: a failure after minutes helps nobody."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from blockattn_rag.engine.recipe import RECIPE_FILE, read_fields
from blockattn_rag.errors import DataError
from blockattn_rag.lazy import missing_extra
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import Passage

_ENCODINGS = 2
"""How often a passage is in the work folder: encoded alone, and after the sink."""

_SAMPLED = 100
"""Passages whose length is counted."""


def check_packages() -> None:
    """Refuse to start without the packages of the training.

    Raises:
        ImportError: One is missing; the message names the extra that installs it.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(f"`repair` needs {missing_extra('accelerate', 'train')}")


def check_output(output: Path, model: BlockModel) -> None:
    """Refuse an output folder that cannot be written, or that holds something else.

    An earlier recipe of the same model is replaced, and so is a damaged one.

    Raises:
        DataError: It does.
        OSError: It cannot be written.
    """
    is_foreign = output.exists() and not (
        output.is_dir() and ((output / RECIPE_FILE).is_file() or not any(output.iterdir()))
    )
    if is_foreign:
        raise DataError(
            f"{output} exists and is not a recipe (it has no {RECIPE_FILE}); choose another folder "
            "(--output)"
        )
    owners, name = _owners(output)
    if owners and model.fingerprint not in owners:
        raise DataError(
            f"{output} holds a recipe of {name} (fingerprints {_short(owners)}), expected one of "
            f"{model.name} (fingerprint {_short([model.fingerprint])}); choose another folder "
            "(--output), or delete that recipe"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output.parent):
        pass


def _owners(output: Path) -> tuple[list[str], str]:
    """Fingerprints and name of the model whose recipe a folder holds; empty if it holds none."""
    try:
        fields = read_fields(output)
    except ValueError:
        return [], ""
    return fields["fingerprints"], fields["model"]


def _short(fingerprints: Sequence[str]) -> str:
    return ", ".join(fingerprint[:12] for fingerprint in fingerprints)


def check_disk(
    work: Path, model: BlockModel, passages: Sequence[Passage], most: int, store_bytes: int
) -> None:
    """Refuse to start where the work folder's disk is too full.

    Args:
        passages: All passages.
        most: Most passages that the repair encodes.
        store_bytes: Most bytes of keys and values in the work folder.

    Raises:
        OSError: There is too little room.
    """
    shown = passages[:: max(1, len(passages) // _SAMPLED)]
    ids = (model.tokenizer.final_ids(one.text, first=False) for one in shown)
    tokens = sum(map(len, ids)) / max(1, len(shown))
    encoded = min(most, len(passages))
    needed = min(store_bytes, int(_ENCODINGS * encoded * tokens * model.bytes_per_token))
    free = shutil.disk_usage(work.parent).free
    if free < needed:
        raise OSError(
            f"found {free / 1e9:.1f} GB free in {os.fspath(work.parent)}, expected "
            f"{needed / 1e9:.1f} GB for keys and values of {encoded} passages; free some, or "
            "choose another folder (--output)"
        )


def check_stock(model: BlockModel) -> None:
    """Refuse a model that needs no recipe.

    Raises:
        DataError: The model was block-fine-tuned.
    """
    if model.is_block_tuned:
        raise DataError(
            f"{model.name} is block-fine-tuned and needs no recipe; measure it with "
            f"`blockattn-rag eval --model {model.name}`"
        )
