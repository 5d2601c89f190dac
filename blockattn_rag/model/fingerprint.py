"""Model fingerprints: hashes of weights, config, dtype, active adapters and tokenizer.

Unchanged weights are identified by the bytes of the files that they were loaded from. A server that
does not load the model with transformers therefore computes the same fingerprint. All other weights
are identified by their tensors.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockattn_rag.model.kinds import LayerKind
from blockattn_rag.model.weight_files import WeightFiles
from blockattn_rag.prompts.tokenization import BlockTokenizer

KV_VERSION = 4
"""Incremented when a release computes different keys and values for the same model and text, or
changes how fingerprints are computed."""

# Config fields that do not affect keys and values, such as names, dropout and generation settings.
_NEUTRAL_FIELDS = frozenset(
    {
        *("_name_or_path", "architectures", "block_attention", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range"),
        *("dtype", "torch_dtype", "attention_dropout", "hidden_dropout", "resid_pdrop"),
        *("output_attentions", "output_hidden_states", "return_dict", "problem_type"),
        *("id2label", "label2id", "chunk_size_feed_forward", "_attn_implementation"),
        "tie_word_embeddings",
    }
)


def fingerprint_of(
    hf_model: PreTrainedModel,
    tokenizer: BlockTokenizer,
    kinds: Sequence[LayerKind] = (),
    files: WeightFiles | None = None,
) -> str:
    """Compute a model's fingerprint: 64 hex digits.

    Models with the same fingerprint compute the same keys and values for the same text. Hooks,
    replaced ``forward`` methods and attributes set on modules are not covered.

    Args:
        kinds: Kinds of the model's layers. They are part of the fingerprint only if some layers
            have latents, a state or no cache.
        files: Files that the weights were loaded from. Default: hash all tensors of the model.
    """
    weights = weights_digest(hf_model) if files is None else files.digests()
    config, adapters = hf_model.config, _adapters(hf_model)
    return fingerprint_of_weights(weights, config, hf_model.dtype, tokenizer, kinds, adapters)


def fingerprint_of_weights(
    weights: str | list[str],
    config: Any,
    dtype: torch.dtype,
    tokenizer: BlockTokenizer,
    kinds: Sequence[LayerKind],
    adapters: dict[str, Any] | None = None,
) -> str:
    """Compute a model's fingerprint without loading the model. ``weights``: Digest of its weights,
    or digests of its weight files."""
    contents = {
        "kv_version": KV_VERSION,
        "config": _settled(config.to_dict()),
        "adapters": adapters or {},
        "dtype": str(dtype),
        "weights": weights,
        "tokenizer": tokenizer.fingerprint,
    }
    # Omit layers that share keys and values, because transformers 5.19 has no caches for them.
    kinds = [kind for kind in kinds if kind.attention != "shared"]
    if not all(kind.is_attention for kind in kinds):
        contents["kinds"] = [repr(kind) for kind in kinds]
    text = json.dumps(contents, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def snapshot(hf_model: PreTrainedModel) -> tuple[Any, ...]:
    """Take a snapshot of a model's config, active adapters and weights, to detect later changes.

    Weights are compared by address and write count, which is cheap enough to do for every batch.
    Not detected: writes that bypass PyTorch's write count (``weight.data.add_(...)``), and writes
    to offloaded, 4-bit or inference tensors, or to buffers that are not saved (rotary tables).
    """
    return _places(hf_model), _settled(hf_model.config.to_dict()), _adapters(hf_model)


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _settled(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _NEUTRAL_FIELDS
    }


def _adapters(hf_model: nn.Module) -> dict[str, Any]:
    """Active and merged adapters of each PEFT layer, with their scales."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:  # PEFT was never imported, so the model has no adapters.
        return {}
    return {
        name: {
            "active": [] if layer.disable_adapters else [*layer.active_adapters],
            "merged": [*layer.merged_adapters],
            "scales": dict(getattr(layer, "scaling", {})),
        }
        for name, layer in hf_model.named_modules()
        if isinstance(layer, peft.BaseTunerLayer)
    }


def _places(hf_model: nn.Module) -> list[tuple[int, int]]:
    """Memory address and write count of each parameter and buffer."""
    places: list[tuple[int, int]] = []
    modules: list[nn.Module | None] = [hf_model]
    while modules:
        # Not `hf_model.modules()`, which takes three times as long: this runs for every batch.
        if (module := modules.pop()) is None:
            continue
        modules += module._modules.values()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or tensor.is_meta:  # Offloaded tensors have no address.
                places.append((0, 0))
            elif hasattr(tensor, "quant_state"):
                # bitsandbytes reorders 4-bit weights in forward passes, and back in `state_dict()`.
                places.append((id(tensor), 0))
            else:
                # Inference tensors have no write count. The model itself may write to tables that
                # are not saved: LongRoPE overwrites its frequencies in each forward pass.
                is_table = name in module._non_persistent_buffers_set
                writes = 0 if is_table or tensor.is_inference() else tensor._version
                places.append((tensor.data_ptr(), writes))
    return places


def weights_digest(hf_model: nn.Module) -> str:
    """xxh3-128 of names, dtypes, shapes and bytes of all parameters, buffers and packed weights.

    The digest depends only on contents: a fine-tuned copy with the same name has a different
    digest, and a renamed copy has the same digest. xxh3 is fast but not cryptographic. It protects
    against mistakes, not against attackers, who could replace the model itself.
    """
    digest = xxhash.xxh3_128()
    known: dict[tuple[Any, ...], str] = {}  # Digests by address, to read tied weights once.
    state = {
        **hf_model.state_dict(),
        **dict(hf_model.named_buffers()),
        **dict(_offloaded(hf_model)),
    }
    for name, value in sorted(state.items()):
        digest.update(json.dumps([name, _content(value, known)]).encode())
    return digest.hexdigest()


def _offloaded(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights that accelerate has offloaded and loads again in each forward pass."""
    for name, module in hf_model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):  # A hook may be a sequence of hooks.
            if (kept := getattr(one, "weights_map", None)) is not None:
                tensors = chain(
                    module.named_parameters(recurse=False), module.named_buffers(recurse=False)
                )
                absent = [own for own, tensor in tensors if tensor.is_meta]
                yield from ((f"{name}.{own}" if name else own, kept[own]) for own in absent)


def _content(value: Any, known: dict[tuple[Any, ...], str]) -> Any:
    """JSON content for a state dict entry: a tensor, packed weights or extra state."""
    if isinstance(value, Tensor):
        if not _is_plain(value) or not value.numel():
            return _tensor_digest(value)
        # Include the device, because different weights may have the same address on two GPUs.
        place = (value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if place not in known:
            known[place] = _tensor_digest(value)
        return known[place]
    if isinstance(value, dict):
        return [[str(key), _content(value[key], known)] for key in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [_content(item, known) for item in value]
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype)):
        return repr(value)
    # The value's repr may contain an address, which would differ in each process.
    return type(value).__qualname__


def _is_plain(tensor: Tensor) -> bool:
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized
    return is_dense and type(tensor) in (Tensor, nn.Parameter)


def _tensor_digest(tensor: Tensor) -> str:
    digest = xxhash.xxh3_128(f"{tensor.dtype}:{tuple(tensor.shape)}".encode())
    for part in _parts(tensor.detach()):
        data = part.to("cpu").contiguous().reshape(-1)
        digest.update(data.view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.is_quantized:
        return [tensor.dequantize()]
    if tensor.layout != torch.strided:
        return [tensor.to_dense()]
    if not _is_plain(tensor) and hasattr(tensor, "__tensor_flatten__"):
        # Tensor subclass from a quantization library.
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    return [tensor]
