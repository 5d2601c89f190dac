"""What the files that options name hold, by digest: something else may come to the same path."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from blockattn_rag.attention.context_merge import LearnedMerge
from blockattn_rag.attention.merge_file import load_merge
from blockattn_rag.engine.options import NO_CORRECTION, NO_READER
from blockattn_rag.model.correction_file import load_correction
from blockattn_rag.model.lora_files import CONFIG, WEIGHTS, read_metadata, state_of


def file_digests(options: Mapping[str, Any]) -> dict[str, str | None]:
    """Digests of all files that the options of an answer name.

    By name: ``correction_digest``, ``merge_digest`` and ``reader_digest``; None where there is no
    file.

    Raises:
        ValueError: the file of a correction or merge is not there.
    """
    return {
        "correction_digest": correction_digest(options["correction"]),
        "merge_digest": merge_digest(options["merge"]),
        "reader_digest": reader_digest(options["reader"]),
    }


def correction_digest(correction: str | Path | None) -> str | None:
    """Digest of what the file of a correction holds; None if there is none.

    Raises:
        ValueError: the file is not there, or it is no file of a correction.
    """
    return None if correction in (None, NO_CORRECTION) else load_correction(str(correction)).digest


def merge_digest(merge: str | None) -> str | None:
    """Digest of what the file of a learned merge holds; None if there is none.

    Raises:
        ValueError: the file is not there, or it is no file of a learned merge.
    """
    found = None if merge is None else load_merge(merge)
    if not isinstance(found, LearnedMerge):
        return None
    return _digest_of_merge(found)


@lru_cache(maxsize=8)
def _digest_of_merge(merge: LearnedMerge) -> str:
    """sha256 of a merge, which is read once while its file stays as it is."""
    digest = hashlib.sha256(merge.fingerprint.encode())
    for tensor in merge.parameters():
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def reader_digest(reader: str | Path | None) -> str | None:
    """The digest that a reader was saved with, or that of the files that PEFT wrote; None if there
    is none."""
    if reader in (None, NO_READER):
        return None
    folder = Path(str(reader)).expanduser()
    noted: str | None = read_metadata(folder).get("digest")
    return noted or _digest_of_files(folder, state_of(folder))


@lru_cache(maxsize=8)
def _digest_of_files(folder: Path, _state: object) -> str | None:
    """sha256 of an adapter's files, whose state is part of the cache's key."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
        except FileNotFoundError:
            return None
    return digest.hexdigest()
