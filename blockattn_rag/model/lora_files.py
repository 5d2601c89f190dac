"""LoRA adapters in PEFT's files: ``adapter_config.json`` and ``adapter_model.safetensors``.

``reader.json`` beside them is ours: which model a reader is for, and how it came about.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockattn_rag.files.atomic import replacing, sync, temporary_name, write_json
from blockattn_rag.model.lora import Lora, placed

CONFIG, WEIGHTS, SIDECAR = "adapter_config.json", "adapter_model.safetensors", "reader.json"
FORMAT, VERSION = "blockattn_rag.reader", 1
ALL_LINEAR = "all-linear"
"""Targets: all linear layers but the output head."""

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
        write_json(temporary / CONFIG, _config_of(layers, metadata.get("base_model")))
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


def _config_of(layers: Mapping[str, Lora], base: Any) -> dict[str, Any]:
    """PEFT's config: the commonest rank and alpha, and patterns for layers that have others."""
    ranks = {path: lora.rank for path, lora in sorted(layers.items())}
    alphas = {path: lora.alpha for path, lora in sorted(layers.items())}
    [(rank, _)] = Counter(ranks.values()).most_common(1)
    [(alpha, _)] = Counter(alphas.values()).most_common(1)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": any(lora.use_rslora for lora in layers.values()),  # one file has one rule
        "target_modules": [*ranks],
        "rank_pattern": {re.escape(p): r for p, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(p): a for p, a in alphas.items() if a != alpha},
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


# -- reading ---------------------------------------------------------------------------------


def read_metadata(folder: Path) -> dict[str, Any]:
    """``reader.json``; empty where PEFT alone wrote the adapter."""
    path = folder / SIDECAR
    if not path.is_file():
        return {}
    found = _read_object(path)
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
    config = _Config(folder / CONFIG)
    tensors = _read_tensors(folder / WEIGHTS)
    linears = {name: m for name, m in hf_model.named_modules() if isinstance(m, nn.Linear)}
    targeted = {path for path in linears if config.targets(path, hf_model)}
    _check_keys(folder, tensors, targeted)
    layers = {}
    for path in sorted(targeted):
        layer, rank = linears[path], config.rank(path)
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


def state_of(folder: Path) -> tuple[tuple[int, int] | None, ...]:
    """Size and time of each file of an adapter; None: there is none."""
    found: list[tuple[int, int] | None] = []
    for name in (CONFIG, WEIGHTS, SIDECAR):
        try:
            state = (folder / name).stat()
            found.append((state.st_size, state.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); get the adapter anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; get the adapter anew")
    return found


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


def _check_keys(folder: Path, tensors: Mapping[str, Tensor], targeted: set[str]) -> None:
    """Raises ``ValueError`` unless every tensor is used, and none is missing."""
    expected = {path + end for path in targeted for end in (_DOWN, _UP)}
    unknown, missing = sorted(tensors.keys() - expected), sorted(expected - tensors.keys())
    if any("lora_embedding" in name for name in unknown):
        raise ValueError(
            f"the adapter in {folder} adapts embeddings ({unknown[0]}); a reader adapts linear "
            "layers alone. Train one without embeddings among the target_modules"
        )
    if unknown:
        raise ValueError(
            f"the adapter in {folder} has {unknown[0]}{_and_more(unknown)}, which no linear layer "
            "of the model takes by its config; it is for another model, or damaged"
        )
    if missing or not targeted:
        raise ValueError(
            f"the adapter in {folder} lacks {missing[0] if missing else 'layers'}"
            f"{_and_more(missing)}, which its config targets in this model; it is for another "
            "model, or damaged"
        )


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


# Settings of PEFT that say nothing of what an adapter computes once it is trained.
_NEUTRAL = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("peft_version", "lora_dropout", "runtime_config", "megatron_core", "block_attention"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        "ensure_weight_tying",
    }
)
# Those that ``_Config`` reads.
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        "init_lora_weights",
    }
)
# Ways to begin that leave the base's weights alone; others train against changed weights.
_PLAIN_INIT = (True, False, "gaussian", "eva", "orthogonal")


class _Config:
    """``adapter_config.json`` of plain LoRA.

    Raises:
        ValueError: it asks for something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = values = _read_object(path)
        if values.get("peft_type") != "LORA":
            self._refuse("peft_type", "train it as LORA")
        if values.get("bias", "none") != "none":
            self._refuse("bias", "train it with bias='none'")
        if values.get("init_lora_weights", True) not in _PLAIN_INIT:
            self._refuse(
                "init_lora_weights",
                "save it as plain LoRA (PEFT's path_initial_model_for_weight_conversion)",
            )
        # Whatever this version of PEFT or a later one adds counts as well.
        for key in sorted(values.keys() - _NEUTRAL - _READ):
            if values[key]:
                self._refuse(key, "train it without")
        self.use_rslora = bool(values.get("use_rslora"))
        self._ranks = self._numbers("r", "rank_pattern", int)
        self._alphas = self._numbers("lora_alpha", "alpha_pattern", (int, float))
        kind = type(values.get("target_modules"))
        if kind not in (str, list):
            self._refuse("target_modules", "expected names of layers")

    def _refuse(self, key: str, remedy: str) -> None:
        raise ValueError(
            f"{self._path} has {key} = {self._values.get(key)!r}; a reader is plain LoRA on linear "
            f"layers: {remedy}"
        )

    def _numbers(self, key: str, pattern_key: str, kind: Any) -> dict[str, Any]:
        """Numbers by PEFT's pattern of a path; ``""``: of all other layers."""
        found = {**(self._values.get(pattern_key) or {}), "": self._values.get(key)}
        for number in found.values():
            if isinstance(number, bool) or not isinstance(number, kind) or not number > 0:
                self._refuse(
                    key if number == found[""] else pattern_key, "expected numbers above 0"
                )
        return found

    def rank(self, path: str) -> int:
        return int(self._of_pattern(self._ranks, path))

    def alpha(self, path: str) -> float:
        return float(self._of_pattern(self._alphas, path))

    @staticmethod
    def _of_pattern(numbers: Mapping[str, Any], path: str) -> Any:
        """As ``peft.utils.other.get_pattern_key`` finds it."""
        keys = (key for key in numbers if key and re.match(rf"(.*\.)?({key})$", path))
        return numbers[next(keys, "")]

    def targets(self, path: str, hf_model: PreTrainedModel) -> bool:
        """Whether a linear layer is adapted, by the rules of
        ``peft.tuners.tuners_utils.check_target_module_exists``."""
        targets, excluded = self._values["target_modules"], self._values.get("exclude_modules")
        if excluded and names_layer(excluded, path):
            return False
        if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
            return path in all_linear(hf_model)
        if isinstance(targets, str) or path in targets or not names_layer(targets, path):
            return names_layer(targets, path)
        layers = self._values.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        patterns = self._values.get("layers_pattern") or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        starts = [rf"(?:^|.*?\.){pattern}" for pattern in patterns] or [r".*?\.[^.]*"]
        indices = (re.match(rf"{start}\.(\d+)\.", path) for start in starts)
        index = next((int(match[1]) for match in indices if match), None)
        return index in ([layers] if isinstance(layers, int) else layers)


def names_layer(targets: Any, path: str) -> bool:
    """Whether a pattern of whole paths, or one of several ends of paths, names a layer."""
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    return any(f".{path}".endswith(f".{target}") for target in targets)


def all_linear(hf_model: PreTrainedModel) -> dict[str, nn.Linear]:
    """All linear layers but the output head, by path."""
    head: Any = hf_model.get_output_embeddings()
    modules = hf_model.named_modules()
    return {p: m for p, m in modules if isinstance(m, nn.Linear) and m is not head}
