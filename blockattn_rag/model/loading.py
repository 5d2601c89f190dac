"""Loading a model and its tokenizer: by path, hub id or name of ours, from GGUF, a LoRA adapter."""

from __future__ import annotations

import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from blockattn_rag.model.gguf import SMOLLM2, dequantised, is_gguf, smollm2
from blockattn_rag.prompts.checkpoints import known_checkpoint

BUNDLED = "bundled"
_BUNDLED_FOLDER = Path(__file__).parent / "bundled"
SIDECAR = "block_attention.json"
"""Beside an adapter: the modes it was trained in, and its base if that is the bundled model."""

_NAMES = (BUNDLED, SMOLLM2)
_MODEL_FILES = ("config.json", "adapter_config.json")
_TOKENIZER_FILE = "tokenizer_config.json"


def resolve_name(model: str | Path) -> str:
    """The path behind ``"bundled"``, ``"smollm2"`` or a GGUF file, or the name as it stands.

    A GGUF file that is asked for the first time is dequantised (``gguf.dequantised``).

    Raises:
        FileNotFoundError: a folder without a model, no such GGUF file, or one of the two names,
            misspelt: the hub would be asked for it, for minutes where there is no network.
    """
    if str(model) == BUNDLED:
        return str(_BUNDLED_FOLDER)
    if str(model) == SMOLLM2:
        model = smollm2()
    folder = Path(model)
    if is_gguf(folder):
        return str(dequantised(folder.expanduser()))
    if folder.is_dir() and not any((folder / name).is_file() for name in _MODEL_FILES):
        raise FileNotFoundError(
            f"{folder} holds no model: expected {' or '.join(_MODEL_FILES)} there, as "
            "save_pretrained writes them"
        )
    if not folder.exists() and (meant := get_close_matches(str(model), _NAMES, 1, 0.8)):
        raise FileNotFoundError(
            f"there is no model {str(model)!r}; did you mean {meant[0]!r}? Of your own models give "
            "the folder, of the hub's the whole id, such as 'organisation/name'"
        )
    return str(model)


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer that belongs to a model name or path; without BOS for models that saw none.

    A folder may hold the tokenizer alone.
    """
    holds_one = (Path(model) / _TOKENIZER_FILE).is_file()
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model) if holds_one else resolve_name(model))
    known = known_checkpoint(str(model))
    if known is not None and not known.bos:
        tokenizer.backend_tokenizer.post_processor = None  # which puts BOS before a text
    return tokenizer


def load_config(model: str | Path) -> Any:
    """The config of a model name or path, without its weights; of a LoRA adapter, its base's."""
    name = resolve_name(model)
    adapter = _adapter(name)
    return load_config(adapter["base"]) if adapter else AutoConfig.from_pretrained(name)


def load_model(
    model: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto", **kwargs: Any
) -> PreTrainedModel:
    """Load a causal language model for inference.

    Args:
        model: a path, a hub id, ``"bundled"``, ``"smollm2"``, a GGUF file, or the path of a LoRA
            adapter (which is merged into its base).
        device: ``"auto"`` takes CUDA, then Apple's MPS, then the CPU; else a torch device.
        dtype: ``"auto"`` is the checkpoint's own on an accelerator; on the CPU, 16-bit types become
            float32, which is faster there and exact.
        kwargs: passed to ``from_pretrained`` (``device_map``, ``quantization_config``, ...).

    Raises as ``resolve_name``.
    """
    name = resolve_name(model)
    loaded: Any
    if adapter := _adapter(name):
        loaded = _load_adapter(name, adapter, dtype, kwargs)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **kwargs)
    if "device_map" not in kwargs:
        loaded = loaded.to(default_device() if device == "auto" else device)
    if dtype == "auto" and loaded.device.type == "cpu" and "quantization_config" not in kwargs:
        loaded = loaded.float()
    return loaded.eval()


def default_device() -> str:
    """The device that ``"auto"`` means: ``$BLOCKATTN_RAG_DEVICE``, an accelerator, or the CPU."""
    if device := os.environ.get("BLOCKATTN_RAG_DEVICE"):
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _adapter(name: str) -> dict[str, Any]:
    """Of a LoRA adapter: its ``base`` (a path, hub id or ``"bundled"``) and the ``tuning`` of it,
    by its own config and by what our training notes beside it, where foreign keys are safe.

    Empty for other models.
    """
    path = Path(name) / "adapter_config.json"
    if not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    beside = path.with_name(SIDECAR)
    noted = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    base = noted.get("base_model") or config["base_model_name_or_path"]
    return {"base": str(base), "tuning": config.get("block_attention") or noted}


def _load_adapter(
    name: str, adapter: dict[str, Any], dtype: str | torch.dtype, kwargs: dict[str, Any]
) -> PreTrainedModel:
    """Base model and adapter, merged: keys and values then depend on plain weights alone."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError(
            f"{name} is a LoRA adapter; loading it needs peft: pip install 'blockattn-rag[train]'"
        ) from error
    base = AutoModelForCausalLM.from_pretrained(
        resolve_name(adapter["base"]), dtype=dtype, **kwargs
    )
    merged = PeftModel.from_pretrained(base, name).merge_and_unload()
    tuning = adapter["tuning"]
    if isinstance(tuning, dict) and "block" not in tuning.get("modes", ["block"]):
        merged.config.block_attention = None  # full mode alone may have undone the base's tuning
    elif tuning:
        merged.config.block_attention = tuning
    return merged
