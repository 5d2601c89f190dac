"""Weight files of checkpoints, and their digests."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import xxhash
from transformers.utils.hub import cached_file

from blockattn_rag.files import locked, state_folder, write_json

logger = logging.getLogger("blockattn_rag")

_NAMES = ("model.safetensors", "pytorch_model.bin")
"""Files that transformers loads, in order of preference. Sharded files have an index instead."""
_DIGEST_DIGITS = 32
_THREADS = 8
_LOCK_TIMEOUT_S = 1800.0
"""Seconds to wait for another process that is hashing the same file."""


class ChangedFileError(OSError):
    """A file changed while it was being hashed."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Snapshot of a weight file's metadata.

    Args:
        path: Resolved path, so that hub snapshots with links to the same file share its digest.
        ctime_ns: Time of the last change to content or metadata. Ignored in comparisons.
        inode: Inode number, which changes if the file is replaced.
    """

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int = field(compare=False)
    inode: int
    device: int

    @classmethod
    def at(cls, path: Path) -> WeightFile:
        """Take a snapshot of a file's current metadata. Raises ``OSError`` if it cannot be read."""
        resolved = path.resolve()
        stat = resolved.stat()
        times = stat.st_mtime_ns, stat.st_ctime_ns
        return cls(resolved, stat.st_size, *times, stat.st_ino, stat.st_dev)

    def digest(self) -> str:
        """Compute the xxh3-128 of the file, unless it is cached in ``state_folder()`` for the same
        path and metadata. If several processes need it, one hashes the file while the others wait.

        Raises:
            ChangedFileError: The file has changed.
            OSError: The file cannot be read.
        """
        try:
            folder = state_folder() / "digests"
        except RuntimeError:  # The user has no home folder.
            return self._computed()
        place = folder / f"{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:32]}.json"
        key = {**asdict(self), "path": str(self.path)}
        if (digest := _kept(place, key)) is not None:
            return digest
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(place.with_suffix(".lock"), timeout_s=_LOCK_TIMEOUT_S):
                # Another process may have computed the digest in the meantime.
                if (digest := _kept(place, key)) is None:
                    digest = self._computed()
                    write_json(place, {**key, "digest": digest})
        except OSError as error:
            if isinstance(error, ChangedFileError) or str(error.filename) == str(self.path):
                raise
            logger.warning(
                "Cannot cache the digest of %s, so it will be recomputed: %s", self.path, error
            )
        return digest or self._computed()

    def _computed(self) -> str:
        with self.path.open("rb") as stream:
            digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
        if WeightFile.at(self.path) != self:
            raise ChangedFileError(
                f"{self.path} changed while it was read, so it cannot identify the model: wait "
                "until it is complete, and load the model again"
            )
        return digest


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Snapshot of all weight files of a checkpoint, in the order of their names.

    ``folder`` contains the files, or links to them. ``index``: None if all weights are in one file.
    """

    source: str
    commit: str | None
    folder: Path
    names: tuple[str, ...]
    files: tuple[WeightFile, ...]
    index: WeightFile | None = None

    @classmethod
    def of(cls, source: str, commit: str | None = None) -> WeightFiles | None:
        """Find the files that transformers loads from a folder, or from the hub at a commit
        (default: the newest). Returns None if the checkpoint has its weights in other files.

        Hub files that are not in the local cache are downloaded.

        Raises:
            OSError: A file cannot be read or downloaded.
            ValueError: The config, or the index of a sharded checkpoint, is damaged.
        """
        config = _file(source, "config.json", commit)
        if config is not None and "transformers_weights" in json.loads(config.read_bytes()):
            return None
        for name in _NAMES:
            if (path := _file(source, name, commit)) is not None:
                return cls(source, commit, path.parent, (name,), (WeightFile.at(path),))
            if (index := _file(source, f"{name}.index.json", commit)) is not None:
                listing = WeightFile.at(index)
                names = _shards(index)
                paths = [_file(source, shard, commit, required=True) for shard in names]
                files = tuple(WeightFile.at(path) for path in paths if path is not None)
                return cls(source, commit, index.parent, names, files, listing)
        return None

    @property
    def is_current(self) -> bool:
        """Whether no file has changed, and all links and indices refer to the same files."""
        try:
            return WeightFiles.of(self.source, self.commit) == self
        except (OSError, ValueError):
            return False

    def digests(self) -> list[str]:
        """``WeightFile.digest`` of each file, sorted so that file names do not matter."""
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


def _shards(index: Path) -> tuple[str, ...]:
    try:
        shards: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        return tuple(sorted({str(name) for name in shards.values()}))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: expected an object in 'weight_map'") from error


def _kept(place: Path, key: dict[str, object]) -> str | None:
    """Cached digest of a file with this metadata. None: not computed yet."""
    try:
        kept = json.loads(place.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(kept, dict) or not isinstance(digest := kept.pop("digest", None), str):
        return None
    return digest if kept == key and len(digest) == _DIGEST_DIGITS else None
