"""The files that a checkpoint's weights are in, and a digest of every byte of them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash
from transformers.utils.hub import cached_file

from blockattn_rag.files import state_folder, write_json

logger = logging.getLogger("blockattn_rag")

_NAMES = ("model.safetensors", "pytorch_model.bin")
"""Files that transformers loads, in its order. Each may be split, and then has an index."""
_DIGEST_DIGITS = 32
_THREADS = 8


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file with weights, at one moment.

    Args:
        path: Path without links, so that snapshots of a hub share the digest of a file.
        size: Bytes.
        mtime_ns: Time of the last change, in nanoseconds.
    """

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> WeightFile:
        """The file as it is now. Raises OSError."""
        stat = path.stat()
        return cls(path.resolve(), stat.st_size, stat.st_mtime_ns)

    def digest(self) -> str:
        """xxh3-128 of the file. It is computed once for a path, a size and a time of change, and
        then kept in ``state_folder()``.

        Raises:
            OSError: The file cannot be read.
        """
        place = _place(self.path)
        key = {"path": str(self.path), "size": self.size, "mtime_ns": self.mtime_ns}
        if (digest := _kept(place, key)) is not None:
            return digest
        with self.path.open("rb") as stream:
            digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
        if place is not None:
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                write_json(place, {**key, "digest": digest})
            except OSError as error:
                logger.warning(
                    "Cannot keep the digest of %s, which is computed again next time: %s",
                    self.path,
                    error,
                )
        return digest


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """All files with a checkpoint's weights, at one moment."""

    files: tuple[WeightFile, ...]

    @classmethod
    def of(cls, source: str, commit: str | None = None) -> WeightFiles | None:
        """The files that transformers loads from a folder or from the hub.

        Args:
            source: Folder or hub id. Files of the hub that are missing in its cache are downloaded.
            commit: Commit of the hub. Default: the newest.

        Returns:
            None if the checkpoint has its weights in other files.

        Raises:
            OSError: A file cannot be read or downloaded.
            ValueError: The index of a split checkpoint is damaged.
        """
        for name in _NAMES:
            if (path := _file(source, name, commit)) is not None:
                return cls((WeightFile.at(path),))
            if (index := _file(source, f"{name}.index.json", commit)) is not None:
                paths = [_file(source, shard, commit, required=True) for shard in _shards(index)]
                return cls(tuple(WeightFile.at(path) for path in paths if path is not None))
        return None

    @property
    def is_current(self) -> bool:
        """Whether no file was changed, replaced or removed since."""
        try:
            return all(WeightFile.at(file.path) == file for file in self.files)
        except OSError:
            return False

    def digests(self) -> list[str]:
        """xxh3-128 of each file, sorted, so that the names of files do not count.

        xxh3 is fast but not cryptographic. It protects against mistakes, not against attackers, who
        could replace the model itself.

        Raises:
            OSError: A file cannot be read.
        """
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            return sorted(pool.map(WeightFile.digest, self.files))


def _file(source: str, name: str, commit: str | None, *, required: bool = False) -> Path | None:
    path = cached_file(
        source,
        name,
        revision=commit,
        _commit_hash=commit,
        _raise_exceptions_for_missing_entries=required,
    )
    return None if path is None else Path(path)


def _shards(index: Path) -> Sequence[str]:
    """Names of the files of a split checkpoint."""
    try:
        shards: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        return sorted({str(name) for name in shards.values()})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: expected an object 'weight_map'") from error


def _place(path: Path) -> Path | None:
    """File with the digest of a file. None: the user has no folder for it."""
    try:
        folder = state_folder()
    except RuntimeError:
        return None
    return folder / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"


def _kept(place: Path | None, key: dict[str, object]) -> str | None:
    """The digest that was kept for a file; None if there is none for this size and time."""
    try:
        kept = json.loads(place.read_bytes()) if place is not None else None
    except (OSError, ValueError):
        return None
    if not isinstance(kept, dict) or not isinstance(digest := kept.pop("digest", None), str):
        return None
    return digest if kept == key and len(digest) == _DIGEST_DIGITS else None
