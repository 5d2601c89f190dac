"""What a model's modules are set to, beside their weights: plain attributes, hooks, new forwards.

A scale on an attention layer, the active adapter, a steering hook: all of them decide keys and
values, and no weight and no config tells of them.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from blockattn_rag.model.weights import tensor_digest

# What every module has for PyTorch's own sake. Hooks of the forward are looked at by themselves.
OF_PYTORCH = frozenset(vars(nn.Module()))

# Attributes that leave keys and values alone, or that differ by machine and by way of loading.
_NEUTRAL = frozenset(
    {
        # For training alone.
        *("gradient_checkpointing", "_gradient_checkpointing_func", "loss_type"),
        # Where a model came from and how it is spread over devices (transformers, accelerate).
        *("name_or_path", "hf_device_map", "_is_hf_initialized", "all_tied_weights_keys"),
        *("model_tags", "warnings_issued", "is_parallelizable", "model_parallel"),
        *("_hf_hook", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "ephemeral_gpu_offload"),
        # Which of several exact implementations is taken; they differ by rounding.
        *("_attn_implementation", "attn_implementation"),
        # Forwards, which are described with the hooks.
        *("forward", "_old_forward"),
        # What a layer of PEFT was made with, devices included; what it took from it stands beside.
        "kwargs",
    }
)

# Hooks and forwards of these do not change what a model computes: ours (relay attention, packed
# weights), accelerate's (moving tensors between devices), transformers' (observing).
_NEUTRAL_PACKAGES = ("blockattn_rag.model.", "accelerate.", "transformers.")

# Objects in closures of closures of hooks, and no deeper: ``_kv_summary`` stands behind this.
_DEPTH = 3

_SCALARS = (bool, int, float, str, type(None))


def settings(hf_model: nn.Module) -> dict[str, Any]:
    """All plain settings of a model's modules, equal in every process that sets up the same.

    By the path of each, such as ``model.layers.0.self_attn.scaling``.
    """
    found: dict[str, Any] = {}
    for name, module in hf_model.named_modules():
        found[name] = type(module).__qualname__
        own = vars(module)
        for attribute, value in own.items():
            counts = attribute not in OF_PYTORCH and _counts(module, attribute)
            if counts and (plain := _plain(value)) is not _OPAQUE:
                found[f"{name}.{attribute}"] = plain
        if own["_forward_pre_hooks"] or own["_forward_hooks"] or "forward" in own:
            found |= _flat(f"{name}()", _replacements(module))
    everywhere = [*torch_module._global_forward_pre_hooks.values()]
    everywhere += torch_module._global_forward_hooks.values()
    found |= _flat("everywhere()", [hook for hook in everywhere if not _is_neutral(hook)])
    return found


def _counts(module: nn.Module, attribute: str) -> bool:
    """Whether an attribute may decide keys and values."""
    # Private ones of a whole model are transformers' notes on loading and on plans of parallelism.
    private = attribute.startswith("_") and isinstance(module, PreTrainedModel)
    return not private and attribute not in _NEUTRAL and "cache" not in attribute


_OPAQUE = object()


def _plain(value: Any) -> Any:
    """A value as JSON can hold it, by content; ``_OPAQUE`` for objects of other types."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        return [_plain_or_type(item) for item in value]
    if isinstance(value, dict):
        pairs = [[str(key), _plain_or_type(item)] for key, item in value.items()]
        return sorted(pairs, key=lambda pair: pair[0])
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain_or_type(item), sort_keys=True) for item in value)
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return _name(value)
    if isinstance(value, functools.partial):
        return [_plain_or_type(part) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, (*_SCALARS, complex, bytes, torch.dtype)):  # and their subclasses
        return repr(value)
    # A tensor that is no buffer.
    return tensor_digest(value) if isinstance(value, Tensor) else _OPAQUE


def _plain_or_type(value: Any) -> Any:
    plain = _plain(value)
    return _name(type(value)) if plain is _OPAQUE else plain


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _replacements(module: nn.Module) -> list[Any]:
    """What runs besides or instead of the forward of a module's class, and is not neutral."""
    # accelerate keeps the forward that it found, and puts its own in front.
    forward = vars(module).get("_old_forward", vars(module).get("forward"))
    found = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        found.append(forward)
    return [function for function in found if not _is_neutral(function)]


def _is_neutral(function: Any) -> bool:
    if isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__module__", None) or type(function).__module__
    return str(home).startswith(_NEUTRAL_PACKAGES)


def _flat(path: str, functions: list[Any]) -> Iterator[tuple[str, Any]]:
    """Functions, each by its code and by the values that it holds, one setting each."""
    for index, function in enumerate(functions):
        yield from _described(f"{path}.{index}", function, _DEPTH)


def _described(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """A function or an object that a function holds: its type, its code, what it holds itself."""
    if isinstance(value, functools.partial):
        held = {"function": value.func, "arguments": value.args, **value.keywords}
    elif isinstance(value, MethodType):
        held = {"function": value.__func__, "self": value.__self__}
    elif isinstance(value, FunctionType):
        yield path, [value.__qualname__, _code_digest(value.__code__)]
        held = _held_by_function(value)
    elif (plain := _plain(value)) is not _OPAQUE:
        yield path, plain
        return
    else:
        yield path, _name(type(value))
        # Modules have their own place among the settings, or none.
        held = {} if isinstance(value, nn.Module) else dict(getattr(value, "__dict__", {}))
        call = getattr(type(value), "__call__", None)  # noqa: B004 -- its code counts
        if isinstance(call, FunctionType):
            held["__call__"] = call
    if depth:
        for name, item in held.items():
            yield from _described(f"{path}.{name}", item, depth - 1)


def _held_by_function(function: FunctionType) -> dict[str, Any]:
    """Defaults of a function's parameters, and what it closes over."""
    held: dict[str, Any] = {"defaults": function.__defaults__, **(function.__kwdefaults__ or {})}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            held[name] = None
    return held


@functools.lru_cache(maxsize=1024)
def _code_digest(code: CodeType) -> str:
    """sha256 of what a function does: instructions, names, constants, inner functions."""
    constants = [
        _code_digest(item) if isinstance(item, CodeType) else _plain_or_type(item)
        for item in code.co_consts
    ]
    text = json.dumps([code.co_code.hex(), code.co_names, constants], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
