"""The output folder of a training: what may be replaced there, and the replacement."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from blockattn_rag.lab import work
from blockattn_rag.model.loading import SIDECAR

LOG = "training_log.json"
"""File of losses by step in a result. A folder with this file counts as an earlier result."""

_NAMES = {
    *("config.json", "generation_config.json", "adapter_config.json", SIDECAR, LOG),
    *("training_curves.png", "README.md", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
}
_WEIGHTS = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|(adapter_)?model\.safetensors\.index\.json"
)
_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer with several chat templates. The only folder in a result."""

_AGAIN = "Give the same ones, or start again (overwrite=True, --overwrite)"


def check_output(
    output: str | Path,
    *,
    overwrite: bool,
    resume: bool = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Check that a result may be written to ``output``, and its work folder used.

    Raises:
        DataError: The interrupted run had other settings, or its settings are damaged.
        FileExistsError: See ``finetune.finetune``.
    """
    folder, result = work.work_of(output), Path(output)
    work.check_idle(folder)
    before = work.interrupted_run(folder)
    if before is not None and not (resume or overwrite):
        raise FileExistsError(
            f"{folder} has an interrupted run; continue it (resume=True, --resume) or discard "
            "it (overwrite=True, --overwrite)"
        )
    if before is not None and not overwrite:
        overwrite = before.pop("overwrite", False)
        work.check_same(folder, before, settings or {}, _AGAIN)
    if _is_other(result):
        raise FileExistsError(
            f"{output} is not an earlier result (a folder with {LOG}), so it is not overwritten; "
            "choose another output"
        )
    if result.exists() and not overwrite:
        raise FileExistsError(
            f"{output} exists; choose another output, or overwrite it (overwrite=True, --overwrite)"
        )


def _is_other(output: Path) -> bool:
    """Whether something exists there that is not an earlier result."""
    return work.is_foreign(output, LOG) or output.is_symlink()


def foreign_names(result: Path) -> str:
    """Names in the folder of an earlier result that are not part of a result, for messages."""
    paths = [*result.iterdir()] if result.is_dir() else []
    names = sorted(path.name for path in paths if not _is_own(path))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _is_own(path: Path) -> bool:
    """Whether transformers or this package may have written a file or folder of a result."""
    if path.is_symlink():
        return False
    if path.name == _TEMPLATES and path.is_dir():
        return all(one.suffix == ".jinja" and one.is_file() for one in path.iterdir())
    return path.is_file() and (path.name in _NAMES or _WEIGHTS.fullmatch(path.name) is not None)


def replace_result(output: Path, result: Path, folder: Path) -> None:
    """Move a finished result to ``output``, and delete the work folder.

    An earlier result stays complete until then.

    Args:
        result: Folder of the new result, in the work folder.
        folder: The work folder.

    Raises:
        FileExistsError: Other files have appeared in ``output`` during the run. They are kept, and
            the new result is moved to the folder that the message names.
    """
    # safetensors writes weights that only their owner can read; the log has the default mode.
    mode = stat.S_IMODE((result / LOG).stat().st_mode)
    for path in result.rglob("*"):
        if path.is_file():
            path.chmod(mode)
    others = foreign_names(output) or ("something else" if _is_other(output) else "")
    if others:
        place = next(path for path in _siblings(output) if not os.path.lexists(path))
        result.rename(place)
        work.remove(folder)
        raise FileExistsError(
            f"{output} has changed during the run (found {others}), so it is kept; the new result "
            f"is in {place}"
        )
    aside = folder / "replaced"
    try:
        if output.exists():
            output.rename(aside)
        result.rename(output)
    except BaseException:
        if aside.exists() and not output.exists():
            aside.rename(output)
        raise
    work.remove(folder)


def _siblings(output: Path) -> Iterator[Path]:
    """Names for a result that cannot be moved to the output folder."""
    path = output.resolve()  # without it, "." would have an empty name
    return (path.with_name(f"{path.name}.new{number if number > 1 else ''}") for number in count(1))
