"""Files in a recipe's folder, which are read and replaced as a unit.

``recipe.json`` lists the other files, its *parts*. The name of a part contains the digest of its
contents, so parts never change. A writer writes the new parts, then commits them by replacing
``recipe.json``, and then deletes all other parts. If interrupted, this leaves either the old or the
new recipe, and parts that the next save deletes. Readers take no lock, and retry if a part is
deleted while they read. Writers exclude each other with an empty lock file, which is never deleted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from blockattn_rag.engine.outline import TEXT_FORMS
from blockattn_rag.files import locked, replacing, sync, write_json

VERSION = 3
RECIPE_FILE = "recipe.json"
MOST_JSON_BYTES = 16 << 20
"""Maximum size of ``recipe.json``, which every load reads completely."""

ADAPTER, PLOT = "adapter-*.safetensors", "report-*.png"
"""Names of parts, where ``*`` is the first 16 hex digits of the SHA-256 of their contents."""

_LOCK = ".lock"
_DIGEST = "[0-9a-f]{16}"
_PART = "|".join(re.escape(name).replace(r"\*", _DIGEST) for name in (ADAPTER, PLOT))
_IS_PART = re.compile(_PART)
_IS_TEMPORARY = re.compile(rf"\.({re.escape(RECIPE_FILE)}|{_PART})\.{_DIGEST}\.tmp")
_OF_DESKTOPS = {".DS_Store", "Thumbs.db", "desktop.ini"}
"""Files that file managers create in every folder. They are ignored, and never deleted."""

_HEAD = b'{\n  "version": %d,\n  "digest": "' % VERSION
_MADE_BY = "`blockattn-rag repair`"
_ATTEMPTS = 20
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
"""Error codes that prove that a file does not exist. Other errors may be transient."""

T = TypeVar("T")


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class RecipeFields:
    """Contents of ``recipe.json``: a recipe's fields, its digest, and the names of its parts."""

    version: int
    digest: str
    sink: str
    adapter: str | None
    promote: int
    recompute: float = 0.0
    positions: str
    fingerprints: list[str]
    model: str
    prompt_format: str
    report: dict[str, Any]
    files: list[str]


def read_fields(folder: Path) -> RecipeFields:
    path = folder / RECIPE_FILE
    with _opened(path) as file:
        content = file.read(MOST_JSON_BYTES + 1)
    if len(content) > MOST_JSON_BYTES:
        raise damaged(path, f"found more than {MOST_JSON_BYTES >> 20} MiB")
    try:
        saved = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"found no valid JSON ({error})") from error
    version = saved.get("version") if isinstance(saved, dict) else None
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path} has version {version!r}, expected {VERSION}: recreate the recipe with "
            f"{_MADE_BY}, or update blockattn_rag."
        )
    try:
        return RecipeFields(**saved)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise damaged(path, f"{name}: {first['msg']}, found {first['input']!r:.80}") from error


def read_consistently(folder: Path, read: Callable[[RecipeFields], T]) -> T:
    """Read the parts of a recipe with ``read``, which is retried if it fails because the recipe was
    replaced in the meantime."""
    for _ in range(_ATTEMPTS):
        fields = read_fields(folder)
        try:
            return read(fields)
        except FileNotFoundError as error:
            failure = damaged(Path(error.filename), "the file is missing")
        except ValueError as error:
            failure = error
        if read_fields(folder) == fields:
            break
    raise failure


def part(folder: Path, kind: str, fields: RecipeFields) -> Path:
    """Verify the contents of a part (``ADAPTER`` or ``PLOT``), and return its path."""
    start = kind.partition("*")[0]
    name = next((name for name in fields.files if name.startswith(start)), None)
    if name is None or not _IS_PART.fullmatch(name):
        raise damaged(folder / RECIPE_FILE, f"found files {fields.files}, expected {kind}")
    path = folder / name
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if name != _name(kind, digest):
        raise damaged(path, f"found SHA-256 {digest}, but its name contains a different digest")
    return path


def write_recipe(folder: Path, fields: Mapping[str, Any], parts: Mapping[str, bytes]) -> None:
    """Write a recipe to a folder. If interrupted, the old or the new recipe remains.

    ``fields``: Fields of ``recipe.json`` except ``version`` and ``files``. ``parts``: Contents of
    the adapter and the plot, by ``ADAPTER`` and ``PLOT``.
    """
    if _LOCK not in _own_names(folder):
        check_replaceable(folder)  # Check the folder before creating anything in it.
    names = {
        _name(kind, hashlib.sha256(content).hexdigest()): content for kind, content in parts.items()
    }
    content = {"version": VERSION, **fields, "files": sorted(names)}
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / _LOCK):
        check_replaceable(folder)
        for name, data in names.items():
            with replacing(folder / name) as file:
                file.write(data)
        write_json(folder / RECIPE_FILE, content)
        for path in [*folder.iterdir()]:
            is_old = _IS_PART.fullmatch(path.name) and path.name not in names
            if is_old or _IS_TEMPORARY.fullmatch(path.name):
                path.unlink(missing_ok=True)
    sync(folder)
    if is_new:
        sync(folder.parent)


def check_replaceable(folder: Path) -> None:
    """Raise ``ValueError`` unless the folder is missing or empty, or contains only a recipe."""
    path = folder / RECIPE_FILE
    if RECIPE_FILE in _own_names(folder) and not _is_recipe(path):
        raise ValueError(
            f"Cannot replace {path}: it is not a recipe of this package. Choose a new or empty "
            "folder, or move the file away."
        )


def _own_names(folder: Path) -> set[str]:
    """Names of the recipe files in a folder. Raises ``ValueError`` if it has any other file."""
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise ValueError(f"{folder} is not a folder: choose a new or empty folder.")
        return set()
    entries = sorted(entry for entry in folder.iterdir() if entry.name not in _OF_DESKTOPS)
    if others := [repr(entry.name) for entry in entries if not _is_own(entry)]:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"{folder} contains {shown}, expected only the files of a recipe: choose a new or "
            "empty folder, or move the other files away."
        )
    return {entry.name for entry in entries}


def damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} is damaged: {why.removesuffix('.')}. Restore the recipe's folder from a copy, or "
        f"recreate it with {_MADE_BY}. (To change a field, use dataclasses.replace and "
        "Recipe.save.)"
    )


def _opened(path: Path) -> BinaryIO:
    try:
        if stat.S_ISREG(path.stat().st_mode):  # Opening a FIFO would block.
            return path.open("rb")
    except PermissionError as error:
        raise PermissionError(
            f"Cannot read the recipe {path}: make its folder, and all files in it, readable by "
            "this user."
        ) from error
    except (OSError, ValueError) as error:  # A null character in the name raises ValueError.
        if isinstance(error, OSError) and error.errno not in _MISSING:
            raise
    raise ValueError(
        f"Found no recipe at {path.parent}: expected a folder with a {RECIPE_FILE} written by "
        f"{_MADE_BY} or `Recipe.save`, 'auto', or {TEXT_FORMS}."
    )


def _name(kind: str, digest: str) -> str:
    return kind.replace("*", digest[:16])


def _is_own(path: Path) -> bool:
    is_known = path.name in (RECIPE_FILE, _LOCK) or _IS_PART.fullmatch(path.name)
    if not is_known and not _IS_TEMPORARY.fullmatch(path.name):
        return False
    try:
        status = path.stat()
    except FileNotFoundError:  # Another writer deleted the file, or it is a broken link.
        return not path.is_symlink()
    return stat.S_ISREG(status.st_mode) and (path.name != _LOCK or status.st_size == 0)


def _is_recipe(path: Path) -> bool:
    """Whether a file is a recipe's ``recipe.json``, even if damaged or of another version."""
    with path.open("rb") as file:
        content = file.read(MOST_JSON_BYTES)
    try:
        saved = json.loads(content)
    except (ValueError, RecursionError):  # The file may be a truncated recipe.
        return _HEAD.startswith(content[: len(_HEAD)])
    return isinstance(saved, dict) and {"version", "digest", "sink", "fingerprints"} <= saved.keys()
