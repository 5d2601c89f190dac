"""LoRA adapters in PEFT's files: ``adapter_config.json`` and ``adapter_model.safetensors``.

``reader.json`` beside them is ours: which model a reader is for, and how it came about.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from blockattn_rag.files.atomic import replacing, sync, temporary_name, write_json
from blockattn_rag.files.state import FileState, file_state
from blockattn_rag.model.lora import Lora, placed
from blockattn_rag.model.lora_config import PlainLora, config_of, read_object

CONFIG, WEIGHTS, SIDECAR = "adapter_config.json", "adapter_model.safetensors", "reader.json"
FORMAT, VERSION = "blockattn_rag.reader", 1
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


# -- writing ---------------------------------------------------------------------------------


def write_loras(folder: Path, layers: Mapping[str, Lora], metadata: Mapping[str, Any]) -> None:
    """Write adapters to ``folder``, whole or not at all; see ``Reader.save``."""
    if not isinstance(metadata.get("fingerprint"), str):
        raise ValueError(
            "metadata needs the 'fingerprint' of the model that the reader is for "
            f"(BlockModel.fingerprint), found {metadata.get('fingerprint')!r}"
        )
    _check_replaceable(folder)
    tensors = {}
    for path, lora in layers.items():
        for end, matrix in ((_DOWN, lora.down), (_UP, lora.up)):
            tensors[_PREFIX + path + end] = matrix.detach().cpu().contiguous()
    _check_finite(tensors, "the reader")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(folder)
    temporary.mkdir()
    try:
        with replacing(temporary / WEIGHTS) as file:
            file.write(save(tensors, {"format": "pt"}))
        write_json(temporary / CONFIG, config_of(layers, metadata.get("base_model")))
        write_json(temporary / SIDECAR, {**metadata, "format": FORMAT, "version": VERSION})
        _take_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync(folder.parent)


def _check_replaceable(folder: Path) -> None:
    """Raises ``FileExistsError`` if something else than a reader, or an empty folder, is there."""
    if not os.path.lexists(folder):
        return
    is_folder = folder.is_dir() and not folder.is_symlink()
    if not is_folder or not ((folder / SIDECAR).is_file() or not any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} is no earlier reader (a folder with {SIDECAR}), so it is not replaced; "
            "choose another folder"
        )


def _take_place(temporary: Path, folder: Path) -> None:
    """Rename ``temporary`` to ``folder``. What was there is put back if that fails; a process that
    is killed between the two renames leaves it beside, under a temporary name."""
    if not folder.exists():
        temporary.rename(folder)
        return
    replaced = temporary_name(folder)
    folder.rename(replaced)
    try:
        temporary.rename(folder)
    except BaseException:
        replaced.rename(folder)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


# -- reading ---------------------------------------------------------------------------------


def read_metadata(folder: Path) -> dict[str, Any]:
    """``reader.json``; empty where PEFT alone wrote the adapter."""
    path = folder / SIDECAR
    if not path.is_file():
        return {}
    found = read_object(path)
    if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} has format {found.get('format')!r}, version {found.get('version')!r}; "
            f"expected {FORMAT!r}, version {VERSION}. Save the reader anew with this version"
        )
    for key in ("fingerprint", "digest"):
        if not isinstance(found.get(key), str):
            raise ValueError(f"{path} has {found.get(key)!r} for {key!r}, expected hex digits")
    return found


def read_loras(folder: Path, hf_model: PreTrainedModel) -> dict[str, Lora]:
    """The adapters in ``folder``, by the path of their layer, on that layer's device; frozen.

    Raises as ``Reader.load``.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no {name}; expected a LoRA adapter as PEFT's save_pretrained "
                "writes it, with safe_serialization"
            )
    config = PlainLora(folder / CONFIG)
    tensors = _read_tensors(folder / WEIGHTS)
    targeted = config.targeted(hf_model)
    _check_keys(folder, tensors, targeted)
    layers = {}
    for path, layer in sorted(targeted.items()):
        rank = config.rank(path)
        matrices = tensors[path + _DOWN], tensors[path + _UP]
        expected = (rank, layer.in_features), (layer.out_features, rank)
        found = tuple(tuple(matrix.shape) for matrix in matrices)
        if found != expected:
            raise ValueError(
                f"the adapter in {folder} has matrices of {found} for {path}, expected {expected} "
                "by its config and the model; it is for another model"
            )
        layers[path] = placed(*matrices, config.alpha(path), layer, use_rslora=config.use_rslora)
    return layers


def state_of(folder: Path) -> tuple[FileState | None, ...]:
    """The state of each file of an adapter; None: there is none."""
    found: list[FileState | None] = []
    for name in (CONFIG, WEIGHTS, SIDECAR):
        try:
            found.append(file_state(folder / name))
        except OSError:
            found.append(None)
    return tuple(found)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """By name without PEFT's prefix."""
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); get the adapter anew") from error
    _check_finite(found, str(path))
    return {name.removeprefix(_PREFIX): tensor for name, tensor in found.items()}


def _check_finite(tensors: Mapping[str, Tensor], name: str) -> None:
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"{key} of {name} holds numbers that are not finite or no fractions")


def _check_keys(folder: Path, tensors: Mapping[str, Tensor], targeted: Iterable[str]) -> None:
    """Raises ``ValueError`` unless every tensor is used, and none is missing."""
    expected = {path + end for path in targeted for end in (_DOWN, _UP)}
    unknown, missing = sorted(tensors.keys() - expected), sorted(expected - tensors.keys())
    whole = [name for name in unknown if "lora_embedding" in name or "lora_" not in name]
    if whole:
        raise ValueError(
            f"the adapter in {folder} holds {whole[0]}; a reader is plain LoRA on linear layers "
            "alone. Train one without embeddings among the target_modules, and save it with "
            "save_embedding_layers=False"
        )
    if unknown:
        raise ValueError(
            f"the adapter in {folder} has {unknown[0]}{_and_more(unknown)}, which no linear layer "
            "of the model takes by its config; it is for another model, or damaged"
        )
    if missing or not expected:
        raise ValueError(
            f"the adapter in {folder} lacks {missing[0] if missing else 'layers'}"
            f"{_and_more(missing)}, which its config targets in this model; it is for another "
            "model, or damaged"
        )


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
