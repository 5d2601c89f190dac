"""Identity of whatever decides a block's keys and values: weights, settings, tokenizer, dtype."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockattn_rag.model.probe import probe_states
from blockattn_rag.model.settings import OF_PYTORCH, settings
from blockattn_rag.model.weights import weights_digest
from blockattn_rag.prompts.tokenization import BlockTokenizer

KV_VERSION = 2
"""Raised whenever this package computes different keys and values for the same model and text."""

_FINE_TYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)

# Fields of a config that name, describe or steer generation, and so leave keys and values alone.
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


class Identity:
    """A model's fingerprint (64 hex digits), and what tells that it no longer holds.

    Two models share a fingerprint only if they compute the same KV for the same text. Reads all
    weights, runs a few tokens. Nobody else may run or change the model meanwhile. Raises as
    ``probe_states``.
    """

    def __init__(self, hf_model: PreTrainedModel, tokenizer: BlockTokenizer) -> None:
        self._hf_model = hf_model
        before = settings(hf_model)
        summary = _kv_summary(hf_model)
        after = settings(hf_model)
        # What running the model changes is a record of runs, not a setting.
        keys, absent = {*before, *after}, object()
        self._records = {k for k in keys if before.get(k, absent) != after.get(k, absent)}
        self._settings = self._without_records(before)
        self._config = _settled(hf_model.config.to_dict())
        self._seen = _Snapshot(hf_model)
        identity = {
            "kv_version": KV_VERSION,
            "config": self._config,
            "dtype": str(hf_model.dtype),
            "weights": weights_digest(hf_model),
            "settings": self._settings,
            "kv_summary": summary,
            "tokenizer": tokenizer.fingerprint,
        }
        text = json.dumps(identity, sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def _without_records(self, found: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in found.items() if key not in self._records}

    def holds(self) -> bool:
        """Whether the model is set as it was: the same adapters, hooks, scales, weights in place.

        Cheap enough for every request. Not seen: values inside objects that a hook holds, and
        writes to weights that leave no trace (``weight.data.add_(...)``).
        """
        if self._seen.is_current():
            return True
        now = _Snapshot(self._hf_model)
        found = settings(self._hf_model)
        if now.weights != self._seen.weights or self._without_records(found) != self._settings:
            return False
        if _settled(self._hf_model.config.to_dict()) != self._config:
            return False
        self._seen = now  # what was changed does not count
        return True


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """A config without its neutral fields, those of the configs inside it included."""
    return {
        key: _settled(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _NEUTRAL_FIELDS
    }


@torch.inference_mode()
def _kv_summary(hf_model: PreTrainedModel) -> list[int | None]:
    """What a fixed probe gives, in four whole numbers: the net under all that a fingerprint lists.

    Weights, settings and hooks are compared exactly. What none of them shows, such as the inside of
    an object that a hook holds, or a patched function of a library, still changes keys and values.
    So four numbers over all layers' keys and values are part of the fingerprint: the sum of the
    logarithms of their sizes, and of projections on fixed random signs, each divided by the root of
    the number of layers. A change of everything by a factor, or of some layers' directions, moves
    them by about 1.

    They are rounded, because machines, thread counts and attention implementations round
    differently. Measured (llama, qwen3, gemma2, phi of 3 to 30 layers; sdpa and eager attention; 1
    and 2 threads), that moves each number by at most 5e-7 in float32, 3e-4 in float16 and 7e-3 in
    bfloat16. A number that moves by d crosses a boundary of rounding with probability d / step. So
    two machines that round differently disagree over one model in some 25,000 in float32
    (4 * 5e-7 / 0.05), and over one in a hundred in bfloat16 (4 * 3e-3 / 1, the mean). They then
    share no stored KV; never the other way round. None stands for a number that is not finite.
    """
    # Other types in a model's state: it computes in 16 bits, or quantises as it goes.
    is_fine = all(
        type(value) in (Tensor, nn.Parameter) and value.dtype in _FINE_TYPES
        for value in hf_model.state_dict().values()
    )
    step = 0.05 if is_fine else 1.0
    layers = probe_states(hf_model)
    numbers = [number for states in zip(*layers, strict=True) for number in _numbers(states)]
    return [round(number / step) if math.isfinite(number) else None for number in numbers]


def _numbers(states: tuple[Tensor, ...]) -> tuple[float, float]:
    """Size and projection of all layers' keys, or values, ``[heads, tokens, size]`` each."""
    generator = torch.Generator().manual_seed(5)
    size = projection = 0.0
    for state in states:
        data = state.double().cpu()
        root = data.pow(2).mean().sqrt().clamp_min(1e-12)
        signs = torch.randint(0, 2, data.shape, generator=generator) * 2 - 1
        size += float(root.log())
        projection += float((data * signs).sum() / root) / math.sqrt(data.numel())
    return size / math.sqrt(len(states)), projection / math.sqrt(len(states))


# Of the containers that every module has, those that decide what a forward computes.
_HELD_BY_PYTORCH = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")


class _Snapshot:
    """What hangs on a model's modules, to see quickly whether anything else hangs there now."""

    def __init__(self, hf_model: nn.Module) -> None:
        self._copies: list[tuple[Any, Any]] = []
        tensors: list[Tensor] = []
        for module in hf_model.modules():
            own = vars(module)
            # Containers are compared by what they hold, each of which is mostly the same object.
            held = [
                value
                for name, value in own.items()
                if isinstance(value, (dict, list, set))
                and (name in _HELD_BY_PYTORCH or name not in OF_PYTORCH)
            ]
            self._copies += [(container, container.copy()) for container in (own, *held)]
            own_tensors = (*module._parameters.values(), *module._buffers.values())
            tensors += [tensor for tensor in own_tensors if tensor is not None]
        configs = {id(c): c for m in hf_model.modules() if (c := vars(m).get("config")) is not None}
        self._copies += [(vars(config), _copied(vars(config))) for config in configs.values()]
        self._tensors = tensors
        self.weights = _places(tensors)

    def is_current(self) -> bool:
        try:
            unchanged = all(container == before for container, before in self._copies)
        except (RuntimeError, ValueError):  # another tensor or array, of many truth values
            return False
        return unchanged and _places(self._tensors) == self.weights


def _copied(settings: dict[str, Any]) -> dict[str, Any]:
    """A copy that does not change with lists and dicts inside."""
    return {k: copy.deepcopy(v) if isinstance(v, (dict, list)) else v for k, v in settings.items()}


def _places(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Where tensors lie, and how often they were written."""
    return [
        # Tensors of inference mode do not count their writes; what is elsewhere (offloaded) moves.
        (0 if t.is_meta else t.data_ptr(), 0 if t.is_inference() or t.is_meta else t._version)
        for t in tensors
    ]
