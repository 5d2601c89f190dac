"""Files of a recipe's folder, which are read and replaced as one unit.

``recipe.json`` names the sha256 of every other file, its *parts*. A writer first writes the new
parts under pending names that contain their sha256, then replaces ``recipe.json``, which commits
them, and then renames the parts. So at every moment, each part that ``recipe.json`` names is
complete under one of two names. Parts of the old recipe that the new one does not have get pending
names before the commit, so no part without a name in ``recipe.json`` is the work of a writer.
Readers take no lock: they start again if ``recipe.json`` was replaced while they read. Writers
exclude each other with a lock file, which is empty and stays.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from blockattn_rag.engine.outline import TEXT_FORMS
from blockattn_rag.files import locked, replacing, sync, write_json

VERSION = 2
RECIPE_FILE = "recipe.json"
ADAPTER_FILE, REPORT_FILE, PLOT_FILE = "adapter.safetensors", "report.json", "report.png"
_PARTS = (ADAPTER_FILE, REPORT_FILE, PLOT_FILE)
_LOCK = ".lock"
_TEMPORARY = re.compile(
    rf"\.+({'|'.join(map(re.escape, (RECIPE_FILE, *_PARTS)))})(\.[0-9a-f]{{16}}\.tmp)+"
)
_OF_DESKTOPS = {".DS_Store", "Thumbs.db", "desktop.ini"}
"""Files that file managers create in every folder. They are neither refused nor deleted."""

_SHA256 = re.compile("[0-9a-f]{64}")

MOST_JSON_BYTES = 16 << 20
"""Maximum size of each of the JSON files. Every load reads them."""

_FIELDS: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "digest": (str,),
    "sink": (str,),
    "adapter": (str, type(None)),
    "promote": (int,),
    "positions": (str,),
    "fingerprints": (list,),
    "model": (str,),
    "prompt_format": (str,),
}
_OPTIONAL: dict[str, tuple[type, ...]] = {"recompute": (int, float)}
_HEADS = [b'{\n  "version": %d,\n  "digest": "' % version for version in (1, VERSION)]

_MADE_BY = "`blockattn-rag repair`"
_READS = 2 * len(_PARTS) + 1  # each failure can be due to the renaming of one part, twice
_REPLACED = 1000
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
"""Codes of the errors that prove that there is no file. The others may be transient."""

T = TypeVar("T")


def read_fields(folder: Path) -> dict[str, Any]:
    """Read and check ``recipe.json``. The key ``files`` has the sha256 of each part, by name."""
    with _opened(folder) as file:
        return _fields(folder / RECIPE_FILE, file)


def read_consistently(folder: Path, read: Callable[[dict[str, Any]], T]) -> T:
    """Read a recipe that may be replaced at the same time.

    Args:
        read: Function that reads the parts and returns the result. Its argument is the result of
            ``read_fields``. It is called again if the recipe was replaced meanwhile.
    """
    path = folder / RECIPE_FILE
    for attempt in range(1, _REPLACED + 1):
        # While the file is open, its inode is not reused, so equal inodes are the same file.
        with _opened(folder) as file:
            fields = _fields(path, file)
            for again in range(_READS):
                try:
                    result = read(fields)
                except (ValueError, FileNotFoundError):
                    if again + 1 < _READS:
                        continue
                    if _is_at(file, path) or attempt == _REPLACED:
                        raise
                else:
                    if _is_at(file, path):
                        return result
                    break
    raise ValueError(f"{path} is replaced all the time: stop the other writers, and try again.")


def part(folder: Path, name: str, fields: Mapping[str, Any]) -> Path:
    """Path of a part whose contents have the sha256 in ``recipe.json``."""
    expected = fields["files"].get(name)
    path, found = folder / name, None
    candidates = [path] if expected is None else [path, _pending(folder, name, expected)]
    for candidate in candidates:
        if not candidate.is_file():
            continue
        if name == REPORT_FILE and candidate.stat().st_size > MOST_JSON_BYTES:
            raise _too_large(candidate)
        if expected is None or (digest := _sha256(candidate)) == expected:
            return candidate
        found = found or digest
    if found is None:
        raise damaged(path, "the file is missing")
    raise damaged(path, f"found sha256 {found}, expected {expected}")


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a recipe."""
    with path.open("rb") as file:
        return _parsed(path, file)


def write_recipe(folder: Path, fields: Mapping[str, Any], parts: Mapping[str, bytes]) -> None:
    """Replace the recipe in a folder, or write a new one. An interruption leaves either recipe."""
    if _LOCK not in _own_names(folder):
        check_replaceable(folder)  # before anything is created there
    files = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}
    saved = {"version": VERSION, **fields, "files": files}
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / _LOCK):
        check_replaceable(folder)
        before = _saved_files(folder)
        _settle(folder, before)
        obsolete = [name for name in _PARTS if name not in parts and (folder / name).exists()]
        try:
            for name, content in parts.items():
                with replacing(_pending(folder, name, files[name])) as file:
                    file.write(content)
            for name in obsolete:
                if name in before:
                    os.replace(folder / name, _pending(folder, name, before[name]))
            write_json(folder / RECIPE_FILE, saved)
        except BaseException:
            with suppress(OSError):  # Keep the original error. The next save repeats this.
                found = _saved_files(folder)  # it may have been committed
                _settle(folder, found, obsolete if found == files else ())
            raise
        _settle(folder, files, obsolete)
    sync(folder)
    if is_new:
        sync(folder.parent)


def check_replaceable(folder: Path) -> None:
    """Check that saving a recipe to a folder would delete nothing but a recipe."""
    names = _own_names(folder)
    if RECIPE_FILE not in names and names & {*_PARTS}:
        raise ValueError(
            f"{folder} is not a recipe: it has no {RECIPE_FILE}. Choose a new or empty folder."
        )
    if RECIPE_FILE in names and not _is_recipe(folder / RECIPE_FILE):
        raise ValueError(
            f"{folder / RECIPE_FILE} is not of a recipe of this package: choose a new or empty "
            "folder, or move the file away."
        )
    if others := _unnamed(folder):
        raise ValueError(
            f"{folder} contains {', '.join(others)}, which its {RECIPE_FILE} does not name: choose "
            "a new or empty folder, or move the other files away."
        )


def _unnamed(folder: Path) -> list[str]:
    """Files with the names of parts that the recipe does not have. Empty if it is damaged."""

    def unnamed(fields: Mapping[str, Any]) -> list[str]:
        if fields["version"] != VERSION:  # version 1 does not name all of its parts
            return []
        return [name for name in _PARTS if name not in fields["files"] and (folder / name).exists()]

    try:
        return read_consistently(folder, unnamed)
    except ValueError:
        return []


def _own_names(folder: Path) -> set[str]:
    """Names in a folder that contains no other files than those of a recipe."""
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise ValueError(f"{folder} is not a folder: choose a new or empty folder.")
        return set()
    entries = sorted(entry for entry in folder.iterdir() if entry.name not in _OF_DESKTOPS)
    if others := [repr(entry.name) for entry in entries if not _is_own(entry)]:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"{folder} contains {shown}, expected nothing but the files of a recipe: choose a new "
            "or empty folder, or move the other files away."
        )
    return {entry.name for entry in entries}


def damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} is damaged: {why.removesuffix('.')}. Restore the recipe's folder from a copy, or "
        f"make it again with {_MADE_BY}. (To change a field, use dataclasses.replace and "
        "Recipe.save.)"
    )


def _too_large(path: Path) -> ValueError:
    return damaged(path, f"found more than {MOST_JSON_BYTES >> 20} MiB")


def _opened(folder: Path) -> BinaryIO:
    path = folder / RECIPE_FILE
    try:
        if stat.S_ISREG(path.stat().st_mode):  # opening a FIFO would block
            return path.open("rb")
    except PermissionError as error:
        raise PermissionError(
            f"Cannot read the recipe {path}: make its folder and all files in it readable for this "
            "user."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        if isinstance(error, OSError) and error.errno not in _MISSING:
            raise
    raise ValueError(
        f"Found no recipe at {folder}: expected a folder with {RECIPE_FILE}, which {_MADE_BY} "
        f"or `Recipe.save` writes, 'auto', or {TEXT_FORMS}."
    )


def _fields(path: Path, file: BinaryIO) -> dict[str, Any]:
    saved = _parsed(path, file)
    version = saved.get("version")
    if type(version) is not int or version not in (1, VERSION):
        raise ValueError(
            f"{path} has version {version!r}, expected {VERSION}: make the recipe again with "
            f"{_MADE_BY}, or update blockattn_rag."
        )
    if version == 1:
        adapter = saved.pop("adapter_sha256", "")
        if not isinstance(adapter, str | None):
            raise damaged(path, f"found adapter_sha256 {adapter!r:.80}, expected a string")
        saved["files"] = {} if adapter is None else {ADAPTER_FILE: adapter}
    if saved.keys() - _OPTIONAL.keys() != {*_FIELDS, "files"}:
        others = ", ".join(sorted((saved.keys() - _OPTIONAL.keys()) ^ {*_FIELDS, "files"}))
        raise damaged(path, f"missing or unknown fields: {others}")
    for name, types in (_FIELDS | _OPTIONAL).items():
        value = saved.get(name, 0.0)
        if not isinstance(value, types) or isinstance(value, bool):
            expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise damaged(path, f"found {name} {value!r:.80}, expected {expected}")
    if not all(isinstance(one, str) for one in saved["fingerprints"]):
        raise damaged(path, "found fingerprints that are no strings")
    _check_files(path, saved, version)
    return saved


def _check_files(path: Path, saved: Mapping[str, Any], version: int) -> None:
    files = saved["files"]
    if not isinstance(files, dict) or not files.keys() <= {*_PARTS}:
        raise damaged(path, f"found files {files!r:.80}, expected some of {', '.join(_PARTS)}")
    for name, digest in files.items():
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise damaged(path, f"found {digest!r:.80} for {name}, expected a sha256")
    expected = {ADAPTER_FILE} if saved["adapter"] is not None else set()
    expected |= {REPORT_FILE} if version == VERSION else set()
    if files.keys() - {PLOT_FILE} != expected:
        raise damaged(path, f"found files {', '.join(files)}, expected {', '.join(expected)}")


def _parsed(path: Path, file: BinaryIO) -> dict[str, Any]:
    content = file.read(MOST_JSON_BYTES + 1)
    if len(content) > MOST_JSON_BYTES:
        raise _too_large(path)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"found no valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise damaged(path, f"found {type(found).__name__}, expected a JSON object")
    return found


def _saved_files(folder: Path) -> dict[str, str]:
    """The sha256 of each part of the recipe. Empty if there is no recipe, or a damaged one."""
    try:
        return dict(read_fields(folder)["files"])
    except ValueError:
        return {}


def _settle(folder: Path, files: Mapping[str, str], obsolete: Iterable[str] = ()) -> None:
    """Rename the pending parts of the recipe, and delete the other temporary files.

    The lock must be held. Needed before a save, because an earlier one may have been interrupted
    after its commit.

    Args:
        files: The sha256 of each part of the recipe.
        obsolete: Parts to delete: those of a damaged recipe or one of version 1, whose sha256 is
            unknown.
    """
    for name in obsolete:
        (folder / name).unlink(missing_ok=True)
    for name, digest in files.items():
        with suppress(FileNotFoundError):  # it has its name already
            os.replace(_pending(folder, name, digest), folder / name)
    for path in [*folder.iterdir()]:
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _pending(folder: Path, name: str, digest: str) -> Path:
    return folder / f".{name}.{digest[:16]}.tmp"


def _is_own(path: Path) -> bool:
    if path.name not in (RECIPE_FILE, *_PARTS, _LOCK) and not _TEMPORARY.fullmatch(path.name):
        return False
    try:
        status = path.stat()
    except FileNotFoundError:  # deleted by another writer, or a link to nothing
        return not path.is_symlink()
    return stat.S_ISREG(status.st_mode) and (path.name != _LOCK or status.st_size == 0)


def _is_recipe(path: Path) -> bool:
    """Whether a ``recipe.json`` is of a recipe, possibly a damaged one or of another version."""
    with path.open("rb") as file:
        content = file.read(MOST_JSON_BYTES)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):  # maybe a truncated one
        return any(head.startswith(content[: len(head)]) for head in _HEADS)
    return isinstance(found, dict) and {"version", "digest", "sink", "fingerprints"} <= found.keys()


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
