"""The work folder of a repair, from which a run that was interrupted resumes.

``<output>.work`` holds ``inputs.json``, the plan, the model's questions, full mode's answers, keys
and values, checkpoints, fits and comparisons. It exists only while a repair runs or was
interrupted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from blockattn_rag.errors import DataError
from blockattn_rag.files import write_json
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, KVStore, StoreStats
from blockattn_rag.store.base import Found, get_many, get_or_error

INPUTS = "inputs.json"
_LOCK = "lock"


def work_of(output: Path) -> Path:
    """The work folder of an output folder, beside it."""
    output = output.resolve()  # the name of "." is empty
    return output.with_name(f"{output.name}.work")


@contextmanager
def work_folder(work: Path, inputs: Mapping[str, str]) -> Iterator[bool]:
    """The work folder while a repair runs; yields whether it resumes an interrupted one.

    A run that fails before it has computed anything leaves none.

    Args:
        work: The folder.
        inputs: Everything that decides the result, for people to read.

    Raises:
        DataError: The folder holds an interrupted run with other inputs, or something else, or
            another process runs a repair in it.
    """
    is_resumed = _is_resumed(work, inputs)
    work.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(work / _LOCK).acquire(blocking=False)
    except Timeout as error:
        raise DataError(
            f"another repair is running in {work}; wait until it ends, or give another --output"
        ) from error
    with held:
        if not is_resumed:
            write_json(work / INPUTS, dict(inputs))
        try:
            yield is_resumed
        except BaseException as error:
            # Questions alone are no use where the inputs have to change.
            kept = (".safetensors",) if isinstance(error, DataError) else (".safetensors", ".jsonl")
            if not any(path.is_file() and path.suffix in kept for path in work.rglob("*")):
                remove(work)
            raise


def _is_resumed(work: Path, inputs: Mapping[str, str]) -> bool:
    path = work / INPUTS
    if not work.exists():
        return False
    if not path.is_file():
        if work.is_dir() and {path.name for path in work.iterdir()} <= {_LOCK}:
            return False
        raise DataError(f"{work} is not a work folder of `repair` (it has no {INPUTS}); move it")
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); delete {work} to start again") from error
    changed = [
        f"{name} ({before.get(name)}, now {inputs.get(name)})"
        for name in sorted({*before, *inputs})
        if before.get(name) != inputs.get(name)
    ]
    if changed:
        raise DataError(
            f"{work} holds an interrupted repair with other inputs: {', '.join(changed)}. Give the "
            "same inputs to resume it, or delete that folder to start again"
        )
    return True


def remove(work: Path) -> None:
    """Delete a work folder; its inputs last, so that what a kill leaves is still known by them."""
    for path in work.iterdir() if work.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != INPUTS:
            path.unlink()
    shutil.rmtree(work, ignore_errors=True)


def kept_json(path: Path, make: Callable[[], Any]) -> Any:
    """What a JSON file holds; it is made and written if there is none.

    Raises:
        DataError: The file is damaged.
    """
    if not path.is_file():
        write_json(path, make())
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path} is damaged ({error}); delete {path.parent} to start again"
        ) from error


class ReadThroughStore:
    """``KVStore`` that reads from a lender what it does not have, and writes to a folder of its
    own: a repair uses a database's blocks and leaves no other ones there. Blocks in int8 are not
    read, because an adapter is not fitted to rounded ones.

    Args:
        path: The folder.
        max_bytes: Most bytes in it.
        lender: The store to read from. None: none.
    """

    def __init__(self, path: Path, max_bytes: int, lender: KVStore | None) -> None:
        # Not flushed to the disk: what a power failure loses is computed again.
        self._own = DirectoryStore(path, max_bytes=max_bytes, fsync=False)
        self._lender = lender

    def get(self, key: str) -> BlockKV | None:
        found = self._own.get(key)
        if found is None and self._lender is not None:
            found = _unrounded(self._lender.get(key))
        return found

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """As ``get`` for each key."""
        found = [get_or_error(self._own, key) for key in keys]
        missing = [key for key, kv in zip(keys, found, strict=True) if kv is None]
        if missing and self._lender is not None:
            lent = dict(zip(missing, get_many(self._lender, missing), strict=True))
            pairs = zip(keys, found, strict=True)
            found = [_unrounded(lent.get(key)) if kv is None else kv for key, kv in pairs]
        return found

    def put(self, key: str, kv: BlockKV) -> None:
        self._own.put(key, kv)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def delete(self, key: str) -> bool:
        return self._own.delete(key)

    def keys(self) -> Iterator[str]:
        return self._own.keys()

    def stats(self) -> StoreStats:
        return self._own.stats()


T = TypeVar("T", bound=Found)


def _unrounded(found: T) -> T | None:
    """What a store answered; None in place of a block in int8."""
    is_rounded = isinstance(found, BlockKV) and found.scales is not None
    return None if is_rounded else found
