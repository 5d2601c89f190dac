"""Checks of a repair before anything is computed: packages, output folder, disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blockattn_rag.engine.recipe import RECIPE_FILE, read_fields
from blockattn_rag.errors import DataError
from blockattn_rag.lab import work
from blockattn_rag.lab.repair.plan import Limits
from blockattn_rag.lazy import missing_extra
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import Passage

_LENGTHS = 100
"""Number of passages whose tokens are counted, to estimate the total."""


def check_packages() -> None:
    """Raise ``ImportError`` if a package that training requires is missing."""
    if find_spec("accelerate") is None:
        raise ImportError(f"`repair` needs {missing_extra('accelerate', 'train')}")


def check_output(output: Path, model: BlockModel) -> None:
    """Refuse an output folder that is not writable or contains anything but a recipe of the model.

    An earlier recipe of the model, or a damaged one, will be replaced.
    """
    if work.is_foreign(output, RECIPE_FILE):
        raise DataError(
            f"{output} exists and is not a recipe (it has no {RECIPE_FILE}); choose another folder "
            "(--output)"
        )
    try:
        found: Mapping[str, Any] = read_fields(output)
    except ValueError:
        found = {"fingerprints": []}
    owners = found["fingerprints"]
    if owners and model.fingerprint not in owners:
        shown = ", ".join(owner[:12] for owner in owners)
        raise DataError(
            f"{output} has a recipe for {found['model']} (fingerprints {shown}), expected one for "
            f"{model.name} (fingerprint {model.fingerprint[:12]}); choose another folder "
            "(--output), or delete that recipe"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output.parent):
        pass


def check_disk(
    folder: Path, model: BlockModel, passages: Sequence[Passage], limits: Limits
) -> None:
    """Raise ``OSError`` if the disk has too little room for passages' keys and values."""
    shown = passages[:: max(1, len(passages) // _LENGTHS)]
    ids = (model.tokenizer.final_ids(one.text, first=False) for one in shown)
    tokens = sum(map(len, ids)) / max(1, len(shown))
    encoded = min(limits.passages * (limits.samples + limits.held_out), len(passages))
    # Each passage is encoded twice: alone and after the sink.
    needed = min(limits.store_bytes, int(2 * encoded * tokens * model.bytes_per_token))
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(
            f"found {free / 1e9:.1f} GB free in {os.fspath(folder.parent)}, expected "
            f"{needed / 1e9:.1f} GB for keys and values of {encoded} passages; free some space, or "
            "choose another folder (--output)"
        )
