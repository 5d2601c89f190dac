"""PEFT's ``adapter_config.json``, of plain LoRA on linear layers; all else is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from blockattn_rag.model.lora import Lora

ALL_LINEAR = "all-linear"
"""Targets: all linear layers but the output head."""


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the file holds none.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
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

    def _refuse(self, key: str, remedy: str) -> None:
        raise ValueError(
            f"{self._path} has {key} = {self._values.get(key)!r}; a reader is plain LoRA on linear "
            f"layers: {remedy}"
        )

    def _numbers(self, key: str, pattern_key: str, kind: Any) -> dict[str, Any]:
        """Numbers by PEFT's pattern of a path; ``""``: of all other layers."""
        patterns = self._values.get(pattern_key) or {}
        if not isinstance(patterns, dict) or not all(map(_is_pattern, patterns)):
            self._refuse(pattern_key, "expected numbers by patterns of layers")
        found = {**patterns, "": self._values.get(key)}
        for pattern, number in found.items():
            if isinstance(number, bool) or not isinstance(number, kind) or not number > 0:
                self._refuse(pattern_key if pattern else key, "expected numbers above 0")
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

    def targeted(self, hf_model: PreTrainedModel) -> dict[str, nn.Linear]:
        """The linear layers that are adapted, by path."""
        try:
            if str(self._values["target_modules"]).lower() == ALL_LINEAR:
                return all_linear(hf_model)
            linears = {n: m for n, m in hf_model.named_modules() if isinstance(m, nn.Linear)}
            return {path: layer for path, layer in linears.items() if self._targets(path)}
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{self._path} is damaged: target_modules, exclude_modules, layers_to_transform "
                f"or layers_pattern name no layers ({error})"
            ) from error

    def _targets(self, path: str) -> bool:
        """By the rules of ``peft.tuners.tuners_utils.check_target_module_exists``."""
        targets, excluded = self._values["target_modules"], self._values.get("exclude_modules")
        if excluded and names_layer(excluded, path):
            return False
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


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


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
