"""The file of a learned merge: a safetensors file with three tensors and what it was fitted to.

``log_temperature`` and ``bias`` ``[layers, heads]`` and ``shift`` ``[layers, key-value heads, value
size]``, float32; the metadata have ``format``, ``version``, the ``fingerprint`` of the model, and
perhaps ``sink`` and ``correction`` (a digest, or ``none``) of the passages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from blockattn_rag.attention.context_merge import ContextMerge, LearnedMerge, parse_merge
from blockattn_rag.files.state import FileState
from blockattn_rag.files.tensor_file import TensorFormat

_FORMAT = TensorFormat(
    "blockattn_rag.context_merge", "1", "a learned merge", "blockattn-rag adapt --fit merge"
)

# Of each tensor, in the order of ``LearnedMerge.parameters``.
_DIMENSIONS = {"log_temperature": 2, "bias": 2, "shift": 3}

_MADE_WITH = ("sink", "correction")


def save_merge(
    merge: LearnedMerge,
    path: Path,
    fingerprint: str,
    made_with: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a fitted merge, whole or not at all.

    Args:
        path: a name that ends in ``.safetensors``.
        fingerprint: of the model that it was fitted to, without adapters of the reader.
        made_with: see ``LearnedMerge``.

    Raises:
        ValueError: another suffix, or a number that is not finite.
        OSError: the file cannot be written.
    """
    named = zip(_DIMENSIONS, merge.parameters(), strict=True)
    tensors = {name: tensor.detach().float().cpu() for name, tensor in named}
    _check(path, tensors)
    told = {name: made_with[name] for name in _MADE_WITH if name in made_with}
    _FORMAT.save(path, tensors, fingerprint=fingerprint, **told)


def load_merge(text: str) -> ContextMerge | None:
    """What a text names (``parse_merge``); a file is read, once while it stays as it is.

    Raises:
        ValueError: a wrong text, no such file, or no file of a learned merge.
    """
    found = parse_merge(text)
    return _read(*_FORMAT.find(found)) if isinstance(found, Path) else found


@lru_cache(maxsize=8)
def _read(path: Path, _state: FileState) -> LearnedMerge:
    """The file at ``path``; its state is part of the cache's key."""
    tensors, metadata = _FORMAT.read(path)
    _check(path, tensors)
    if "fingerprint" not in metadata:
        raise ValueError(f"{path} is damaged: it does not tell fingerprint")
    log_temperature, bias, shift = (tensors[name].float() for name in _DIMENSIONS)
    told = {name: metadata[name] for name in _MADE_WITH if name in metadata}
    return LearnedMerge(log_temperature, bias, shift, metadata["fingerprint"], told)


def _check(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raises ``ValueError`` unless names and shapes are those of a learned merge."""
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
