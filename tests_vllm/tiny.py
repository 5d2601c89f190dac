"""Tiny random checkpoints with layers that the bundled model does not have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests_vllm.reference import MODEL

_BASE: dict[str, Any] = {
    "vocab_size": 1202,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    # No recipe, as if it had been fine-tuned for block mode.
    "block_attention": {"modes": ["block", "full"], "positions": "reordered", "version": 1},
}
WINDOW = 65
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "windows and sinks": (
        "gpt_oss",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}
"""Family of transformers and its config, by the layers that it has."""


def save(layers: str, folder: Path) -> Path:
    """Save a checkpoint of ``FAMILIES`` with the tokenizer of the bundled model. Its weights are
    spread, so that attention is far from uniform."""
    family, config = FAMILIES[layers]
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(family, **(_BASE | config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_tokens" not in name:
                parameter.mul_(8)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(MODEL) / file, folder)
    return folder
