"""The file of a learned merge: a safetensors file with three tensors and a fingerprint.

``log_temperature`` and ``bias`` ``[layers, heads]`` and ``shift`` ``[layers, key-value heads, value
size]``, float32; the metadata have ``format``, ``version`` and the ``fingerprint`` of the model.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from blockattn_rag.attention.context_merge import (
    FILE_SUFFIX,
    ContextMerge,
    LearnedMerge,
    parse_merge,
)
from blockattn_rag.files.atomic import replacing
from blockattn_rag.files.state import FileState, file_state

FORMAT = "blockattn_rag.context_merge"
VERSION = "1"

# Of each tensor, in the order of ``LearnedMerge.parameters``.
_DIMENSIONS = {"log_temperature": 2, "bias": 2, "shift": 3}


def save_merge(merge: LearnedMerge, path: Path, fingerprint: str) -> None:
    """Write a fitted merge, whole or not at all.

    Args:
        path: a name that ends in ``.safetensors``.
        fingerprint: of the model that it was fitted to, without adapters of the reader.

    Raises:
        ValueError: another suffix, or a number that is not finite.
        OSError: the file cannot be written.
    """
    if path.suffix != FILE_SUFFIX:
        raise ValueError(f"found the name {path}, expected one that ends in {FILE_SUFFIX}")
    tensors = {
        name: tensor.detach().float().cpu().contiguous()
        for name, tensor in zip(_DIMENSIONS, merge.parameters(), strict=True)
    }
    _check(path, tensors)
    metadata = {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint}
    with replacing(path) as file:
        file.write(save(tensors, metadata))


def load_merge(text: str) -> ContextMerge | None:
    """What a text names (``parse_merge``); a file is read, once while it stays as it is.

    Raises:
        ValueError: a wrong text, no such file, or no file of a learned merge.
    """
    found = parse_merge(text)
    if not isinstance(found, Path):
        return found
    path = found.expanduser().resolve()
    try:
        state = file_state(path)
    except OSError as error:
        raise ValueError(
            f"found no file {found} ({error.strerror}); expected a learned merge"
        ) from (error)
    return _read(path, state)


@lru_cache(maxsize=8)
def _read(path: Path, _state: FileState) -> LearnedMerge:
    """The file at ``path``; its state is part of the cache's key."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no file of a learned merge: {error}") from error
    found = metadata.get("format"), metadata.get("version")
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"{path} is no file of a learned merge: found format {found[0]!r}, version "
            f"{found[1]!r}, expected {FORMAT!r}, {VERSION!r}"
        )
    _check(path, tensors)
    log_temperature, bias, shift = (tensors[name].float() for name in _DIMENSIONS)
    return LearnedMerge(log_temperature, bias, shift, metadata.get("fingerprint", ""))


def _check(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raises ``ValueError`` unless names, shapes and numbers are those of a learned merge."""
    outline = {name: tensor.dim() for name, tensor in sorted(tensors.items())}
    if outline != _DIMENSIONS:
        raise ValueError(f"{path}: found tensors of dimensions {outline}, expected {_DIMENSIONS}")
    heads, shift = tensors["bias"].shape, tensors["shift"].shape
    agree = tensors["log_temperature"].shape == heads and shift[0] == heads[0]
    if not agree or 0 in shift or heads[1] == 0 or heads[1] % shift[1]:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise ValueError(
            f"{path}: found tensors of shapes {shapes}, expected [layers, heads] twice, and "
            "[layers, key-value heads, value size] for shift"
        )
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: found NaN or infinity in {name}, expected finite numbers")
