"""Small immutable files beside the entries of a store, such as the index of passages.

A file has a path of several parts, ``"folder/name"``. It is written atomically and never changed,
so readers need no lock: a file is complete or absent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

SIDECAR = "sidecar"
"""Folder of the files in a store."""


class Sidecar(ABC):
    """Files of one store. All methods raise StoreError if the store fails."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Paths of all files below a folder, relative to it. Empty if there is no such folder."""

    @abstractmethod
    def read(self, paths: Sequence[str]) -> list[bytes | None]:
        """Contents of files, in order. None: there is no such file."""

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Write a file atomically, replacing any older one."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file, if it exists."""


class MemorySidecar(Sidecar):
    """Files in the memory of this process."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def names(self, folder: str) -> list[str]:
        start = f"{folder}/"
        return [path.removeprefix(start) for path in [*self._files] if path.startswith(start)]

    def read(self, paths: Sequence[str]) -> list[bytes | None]:
        return [self._files.get(path) for path in paths]

    def write(self, path: str, content: bytes) -> None:
        self._files[path] = content

    def delete(self, path: str) -> None:
        self._files.pop(path, None)
