"""The file of a correction: a safetensors file with two tensors for each layer.

``weight.L`` ``[key-value heads, D, D]`` and ``bias.L`` ``[key-value heads, places, D]``, float32,
for layer L; the metadata have ``format``, ``version``, ``sink`` and the model's ``fingerprint``.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from blockattn_rag.files.atomic import replacing
from blockattn_rag.files.state import FileState, file_state
from blockattn_rag.model.correction import NUM_PLACES, Correction, LayerCorrection

FORMAT = "blockattn_rag.correction"
VERSION = "1"
SUFFIX = ".safetensors"


def save_correction(correction: Correction, path: Path) -> None:
    """Write a correction, whole or not at all.

    Raises:
        ValueError: another suffix than ``.safetensors``, or a number that is not finite.
        OSError: the file cannot be written.
    """
    if path.suffix != SUFFIX:
        raise ValueError(f"found the name {path}, expected one that ends in {SUFFIX}")
    tensors = {
        f"{name}.{index}": tensor.detach().float().cpu().contiguous()
        for index, layer in enumerate(correction.layers)
        for name, tensor in layer._asdict().items()
    }
    _layers(path, tensors)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "sink": correction.sink,
        "fingerprint": correction.fingerprint,
    }
    with replacing(path) as file:
        file.write(save(tensors, metadata))


def load_correction(path: str | Path) -> Correction:
    """Read a correction, once while the file stays as it is.

    Raises:
        ValueError: no such file, or it is no file of a correction.
    """
    found = Path(path).expanduser().resolve()
    try:
        state = file_state(found)
    except OSError as error:
        raise ValueError(
            f"found no file {path} ({error.strerror}); expected a correction, which "
            "`blockattn-rag adapt --fit correction` writes, or 'none'"
        ) from error
    return _read(found, state)


@lru_cache(maxsize=4)
def _read(path: Path, _state: FileState) -> Correction:
    """The file at ``path``; its state is part of the cache's key."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no file of a correction: {error}") from error
    found = metadata.get("format"), metadata.get("version")
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"{path} is no file of a correction: found format {found[0]!r}, version {found[1]!r}, "
            f"expected {FORMAT!r}, {VERSION!r}"
        )
    if missing := {"sink", "fingerprint"} - metadata.keys():
        raise ValueError(f"{path} is damaged: it does not tell {', '.join(sorted(missing))}")
    return Correction(_layers(path, tensors), metadata["sink"], metadata["fingerprint"])


def _layers(path: Path, tensors: dict[str, Tensor]) -> tuple[LayerCorrection, ...]:
    """The layers; raises ``ValueError`` unless names, shapes and numbers are a correction's."""
    layers = []
    for index in range(len(tensors) // 2):
        try:
            layer = LayerCorrection(tensors[f"weight.{index}"], tensors[f"bias.{index}"])
        except KeyError as error:
            raise ValueError(f"{path}: found no tensor {error.args[0]}") from error
        shapes = tuple(layer.weight.shape), tuple(layer.bias.shape)
        heads, _, size = shapes[1] if len(shapes[1]) == 3 else (0, 0, 0)
        if shapes != ((heads, size, size), (heads, NUM_PLACES, size)):
            raise ValueError(
                f"{path}: found shapes {shapes[0]} and {shapes[1]} in layer {index}, expected "
                f"(heads, size, size) and (heads, {NUM_PLACES}, size)"
            )
        layer = LayerCorrection(*(tensor.float() for tensor in layer))
        if not all(bool(tensor.isfinite().all()) for tensor in layer):
            raise ValueError(f"{path}: found NaN or infinity in layer {index}")
        layers.append(layer)
    if len(tensors) != 2 * len(layers) or not layers:
        raise ValueError(f"{path}: found {len(tensors)} tensors, expected two for each layer")
    return tuple(layers)
