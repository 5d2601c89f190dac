"""The package's small safetensors files, such as corrections: they tell what they are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from blockattn_rag.files.atomic import replacing
from blockattn_rag.files.state import FileState, file_state

SUFFIX = ".safetensors"


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
            ValueError: it is no such file, or holds numbers that are not finite.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no file of {self.what}: {error}") from error
        found = metadata.get("format"), metadata.get("version")
        if found != (self.name, self.version):
            raise ValueError(
                f"{path} is no file of {self.what}: found format {found[0]!r}, version "
                f"{found[1]!r}, expected {self.name!r}, {self.version!r}"
            )
        _check_finite(path, tensors)
        return tensors, metadata


def _check_finite(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: found NaN or infinity in {name}, expected finite numbers")
