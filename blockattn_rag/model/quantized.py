"""Quantized weights: checkpoints that are quantized, and quantization at load."""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, TorchAoConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.lazy import missing_extra

WEIGHTS = ("int8", "nf4")
"""Types that the weights of linear layers can be quantized to at load: 8-bit integers with a scale
per row (torchao), and 4-bit NormalFloat (bitsandbytes). Activations are not quantized."""

_PACKAGES = {
    "awq": ("gptqmodel",),
    "gptq": ("gptqmodel", "optimum"),
    "auto-round": ("auto-round",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "hqq": ("hqq",),
    "quark": ("amd-quark",),
    "torchao": ("torchao",),
}
"""Packages that transformers requires to load a quantized checkpoint, in addition to accelerate."""
_MODULES = {"amd-quark": "quark"}
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
# Attribute of bitsandbytes' 4-bit layers that enables a kernel. The kernel requires a multiple of
# 32 outputs, and complete blocks of inputs.
_CPU_KERNEL, _KERNEL_ROWS = "support_avx512bf16_for_cpu", 32
# Methods whose weights transformers dequantizes at load, but only on machines without a GPU.
_DEQUANTIZED_ON_CPU = ("fp8", "mxfp4")
# Methods whose weights would be dequantized, and thereby changed, in the first forward pass.
_DEQUANTIZED = ("compressed-tensors",)


def quantization_of(config: Any) -> dict[str, Any]:
    """Quantization settings in a checkpoint's config. Empty if the weights are not quantized."""
    configs = (config, config.get_text_config(decoder=True))
    found = (getattr(one, "quantization_config", None) for one in configs)
    settings: Any = next(filter(None, found), {})
    return dict(settings) if isinstance(settings, Mapping) else settings.to_dict()


def check_quantization(name: str, settings: Mapping[str, Any]) -> None:
    """Reject an unsupported checkpoint before its weights are downloaded.

    Raises ``ImportError`` if a package is missing, and ``UnsupportedModelError`` if block mode is
    not exact for this quantization, or transformers does not support it.
    """
    if not settings:
        return
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if settings.get("load_in_8bit") or method == "bitsandbytes_8bit":
        raise UnsupportedModelError(
            f"{name} is quantized to 8 bits with bitsandbytes, which block mode does not support: "
            "LLM.int8 quantizes activations, and its outliers depend on all tokens of a forward "
            "pass, so a block's keys and values would depend on other blocks. Use a 4-bit "
            "checkpoint, or the original checkpoint with dtype='int8'."
        )
    if method != "bitsandbytes" and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{name} is quantized with {method!r}, which this version of transformers does not "
            "support: update transformers, or use another checkpoint of the model."
        )
    packages = ("accelerate", *_PACKAGES.get(method, ()))
    modules = {package: _MODULES.get(package, package.replace("-", "_")) for package in packages}
    missing = [name for name, module in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(
            f"{name} is quantized with {method}. Loading it needs {' and '.join(missing)}: run "
            f"`pip install {' '.join(missing)}`"
        )


def loading_arguments(
    name: str, config: Any, dtype: str | torch.dtype, device: str
) -> dict[str, Any]:
    """Arguments for ``from_pretrained``: the dtype, and how to quantize or dequantize weights.

    With ``"auto"``, the dtype on the CPU is float32, unless the weights stay quantized.
    """
    settings = quantization_of(config)
    check_quantization(name, settings)
    if dtype in WEIGHTS:
        if settings:
            raise ValueError(
                f"dtype={dtype!r} quantizes weights at load, but {name} is already quantized with "
                f"{settings.get('quant_method')}: omit dtype"
            )
        return {"device_map": device, **_quantized_at_load(str(dtype))}
    arguments: dict[str, Any] = {"dtype": dtype}
    if settings:
        arguments["device_map"] = device
        method = settings.get("quant_method")
        if method in _DEQUANTIZED or (device == "cpu" and method in _DEQUANTIZED_ON_CPU):
            arguments["config"] = copy.deepcopy(config)
            arguments["config"].quantization_config = {**settings, "dequantize": True}
    if dtype == "auto" and device == "cpu" and (not settings or "config" in arguments):
        # Convert during loading: in the config's dtype, weights with more bits would be rounded.
        arguments["dtype"] = torch.float32
    return arguments


def _quantized_at_load(weights: str) -> dict[str, Any]:
    package = "torchao" if weights == "int8" else "bitsandbytes"
    for needed in ("accelerate", package):
        if importlib.util.find_spec(needed) is None:
            raise ImportError(
                f"Loading with dtype={weights!r} needs {missing_extra(needed, 'quantized')}"
            )
    # Compute in bfloat16. In float32, torchao converts all weights for each token, which takes ten
    # times as long, and bitsandbytes still rounds to bfloat16 on CPUs that support it.
    dtype = torch.bfloat16
    config: Any
    if weights == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        config = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    else:
        settings: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        config = BitsAndBytesConfig(load_in_4bit=True, **settings)
    return {"dtype": dtype, "quantization_config": config}


@contextmanager
def small_heap() -> Iterator[None]:
    """Context manager that frees the memory of original weights as soon as they are quantized.

    By default, glibc keeps most of it, so loading would need memory for all original weights.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 18)
    try:
        yield
    finally:
        # The largest threshold that glibc would choose itself.
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)
        libc.malloc_trim(0)


def allow_all_shapes(hf_model: nn.Module) -> None:
    """Disable bitsandbytes' CPU kernel in layers whose shapes the kernel does not support."""
    for module in hf_model.modules():
        if hasattr(module, _CPU_KERNEL):
            layer: Any = module
            columns = layer.weight.quant_state.blocksize
            if layer.out_features % _KERNEL_ROWS or layer.in_features % columns:
                setattr(layer, _CPU_KERNEL, False)
