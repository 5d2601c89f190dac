"""PEFT's ``adapter_config.json``, of plain LoRA on linear layers; all else is refused."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import regex
import torch
from torch import nn
from transformers import PreTrainedModel

from blockattn_rag.model.lora import Lora

ALL_LINEAR = "all-linear"
"""Targets: all linear layers but the output head."""

_MATCHING_S = 30.0
"""How long all regular expressions of a config may take together, which rarely takes a second."""

_MOST_CHARACTERS = 10_000


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the file holds none.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); get the adapter anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; get the adapter anew")
    return found


def config_of(layers: Mapping[str, Lora], base: Any) -> dict[str, Any]:
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


# Settings of PEFT that say nothing of what an adapter computes once it is trained.
_NEUTRAL = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("peft_version", "lora_dropout", "runtime_config", "megatron_core", "block_attention"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        "ensure_weight_tying",
    }
)
# Those that ``PlainLora`` reads.
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        "init_lora_weights",
    }
)
# Ways to begin that leave the base's weights alone; others train against changed weights.
_PLAIN_INIT = (True, False, "gaussian", "eva", "orthogonal")


class PlainLora:
    """``adapter_config.json`` of plain LoRA.

    Raises:
        ValueError: it asks for something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left_s = _MATCHING_S
        self._compiled: dict[str, regex.Pattern[str]] = {}
        self._values = values = read_object(path)
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

    def _refuse(self, key: str, remedy: str) -> NoReturn:
        raise ValueError(
            f"{self._path} has {key} = {self._values.get(key)!r:.200}; a reader is plain LoRA on "
            f"linear layers: {remedy}"
        )

    def _numbers(self, key: str, pattern_key: str, kind: Any) -> dict[str, Any]:
        """Numbers by PEFT's pattern of a path; ``""``: of all other layers."""
        patterns = self._values.get(pattern_key) or {}
        if not isinstance(patterns, dict) or not all(map(_is_pattern, patterns)):
            self._refuse(pattern_key, "expected numbers by patterns of layers")
        found = {**patterns, "": self._values.get(key)}
        for pattern, number in found.items():
            is_number = isinstance(number, kind) and not isinstance(number, bool)
            if not is_number or not 0 < number <= torch.finfo(torch.float32).max:
                self._refuse(pattern_key if pattern else key, "expected finite numbers above 0")
        return found

    def rank(self, path: str) -> int:
        return int(self._of_pattern(self._ranks, "rank_pattern", path))

    def alpha(self, path: str) -> float:
        return float(self._of_pattern(self._alphas, "alpha_pattern", path))

    def _of_pattern(self, numbers: Mapping[str, Any], name: str, path: str) -> Any:
        """As ``peft.utils.other.get_pattern_key`` finds it."""
        matching = (key for key in numbers if key and self._match(rf"(.*\.)?({key})$", path, name))
        return numbers[next(matching, "")]

    def _match(self, pattern: str, path: str, name: str) -> regex.Match[str] | None:
        """A pattern of the config's field ``name`` at the start of a layer's path.

        Some patterns take longer than anybody can wait. The module ``regex`` can give up; ``re``
        cannot.
        """
        if (compiled := self._compiled.get(pattern)) is None:
            compiled = self._compiled[pattern] = regex.compile(pattern)
        began = time.monotonic()
        try:
            return compiled.match(path, timeout=max(self._left_s, 0.001))
        except TimeoutError:
            self._refuse(
                name, "its patterns take too long to match, list the names of the layers instead"
            )
        finally:
            self._left_s -= time.monotonic() - began

    def targeted(self, hf_model: PreTrainedModel) -> dict[str, nn.Linear]:
        """The linear layers that are adapted, by path."""
        try:
            if str(self._values["target_modules"]).lower() == ALL_LINEAR:
                return all_linear(hf_model)
            linears = {n: m for n, m in hf_model.named_modules() if isinstance(m, nn.Linear)}
            return {path: layer for path, layer in linears.items() if self._targets(path)}
        except (regex.error, RecursionError, TypeError) as error:
            raise ValueError(
                f"{self._path} is damaged: target_modules, exclude_modules, layers_to_transform "
                f"or layers_pattern name no layers ({error})"
            ) from error

    def _targets(self, path: str) -> bool:
        """By the rules of ``peft.tuners.tuners_utils.check_target_module_exists``."""
        targets, excluded = self._values["target_modules"], self._values.get("exclude_modules")
        if excluded and self._names_layer(excluded, path, "exclude_modules"):
            return False
        is_target = self._names_layer(targets, path, "target_modules")
        if isinstance(targets, str) or path in targets or not is_target:
            return is_target
        layers = self._values.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        patterns = self._values.get("layers_pattern") or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        starts = [rf"(?:^|.*?\.){pattern}" for pattern in patterns] or [r".*?\.[^.]*"]
        indices = (self._match(rf"{start}\.(\d+)\.", path, "layers_pattern") for start in starts)
        index = next((int(match[1]) for match in indices if match), None)
        return index in ([layers] if isinstance(layers, int) else layers)

    def _names_layer(self, targets: Any, path: str, name: str) -> bool:
        """Whether a pattern of whole paths, or one of several ends of paths, names a layer."""
        if not isinstance(targets, str):
            return names_layer(targets, path)
        if not _is_pattern(targets):
            self._refuse(name, "expected names of layers, or a regular expression")
        return self._match(rf"(?:{targets})\Z", path, name) is not None


def _is_pattern(text: str) -> bool:
    try:
        regex.compile(text)
    except (regex.error, RecursionError):
        return False
    return len(text) <= _MOST_CHARACTERS


def names_layer(targets: Iterable[str], path: str) -> bool:
    """Whether one of several ends of paths names a layer."""
    return any(f".{path}".endswith(f".{target}") for target in targets)


def all_linear(hf_model: PreTrainedModel) -> dict[str, nn.Linear]:
    """All linear layers but the output head, by path."""
    head: Any = hf_model.get_output_embeddings()
    modules = hf_model.named_modules()
    return {p: m for p, m in modules if isinstance(m, nn.Linear) and m is not head}
