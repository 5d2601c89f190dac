"""The package's small safetensors files, such as corrections.

Their metadata name the format, its version, and the sha256 of everything else in the file. A file
that was damaged or changed by hand is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from blockattn_rag.files.atomic import replacing
from blockattn_rag.files.state import FileState, file_state

SUFFIX = ".safetensors"

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TensorFormat(NamedTuple):
    """What a kind of file is called.

    Args:
        name, version: in the metadata of each file.
        what: for people, such as ``"a learned merge"``.
        made_by: the command that writes such files.
    """

    name: str
    version: str
    what: str
    made_by: str

    def save(self, path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
        """Write a file, whole or not at all.

        Raises:
            ValueError: another suffix than ``.safetensors``, or a number that is not finite.
            OSError: the file cannot be written.
        """
        if path.suffix != SUFFIX:
            raise ValueError(f"found the name {path}, expected one that ends in {SUFFIX}")
        _check_finite(path, tensors)
        told = {"format": self.name, "version": self.version, **metadata}
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        told["sha256"] = digest_of(contiguous, told)
        with replacing(path) as file:
            file.write(save(contiguous, told))

    def find(self, path: str | Path) -> tuple[Path, FileState]:
        """The resolved path of a file, and its state, which together are keys for a cache.

        Raises:
            ValueError: there is no such file.
        """
        found = Path(path).expanduser().resolve()
        try:
            return found, file_state(found)
        except OSError as error:
            raise ValueError(
                f"found no file {path} ({error.strerror}); expected {self.what}, which "
                f"`{self.made_by}` writes, or 'none'"
            ) from error

    def read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and metadata of a file.

        Raises:
            ValueError: it is no such file, is damaged, or holds other than finite numbers.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} is no file of {self.what}: {error}") from error
        found = metadata.get("format"), metadata.get("version")
        if found != (self.name, self.version):
            raise ValueError(
                f"{path} is no file of {self.what}: found format {found[0]!r}, version "
                f"{found[1]!r}, expected {self.name!r}, {self.version!r}. Make it anew by "
                f"`{self.made_by}`"
            )
        digest = digest_of(tensors, metadata)
        if metadata.get("sha256") != digest:
            raise ValueError(
                f"{path} is damaged: its contents have the sha256 {digest}, it says "
                f"{metadata.get('sha256')!r}. Get it anew, or make it anew by `{self.made_by}`"
            )
        _check_finite(path, tensors)
        return tensors, metadata


def digest_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """sha256 of tensors and metadata, but for the entry ``sha256``: 64 hex digits."""
    told = {name: value for name, value in metadata.items() if name != "sha256"}
    named = sorted(tensors.items())
    outline = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in named]
    digest = hashlib.sha256(json.dumps([sorted(told.items()), outline]).encode())
    for _, tensor in named:
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_finite(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{path}: found {tensor.dtype} in {name}, expected one of "
                f"{', '.join(map(str, _DTYPES))}"
            )
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: found NaN or infinity in {name}, expected finite numbers")
