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
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "head_dim": 64,
    # The sizes that vLLM's kernel for CPUs has.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "q_lora_rank": 64,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    # As in published configs. transformers needs neither, but vLLM's default is softmax.
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
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
    "latent": (
        "deepseek_v3",
        {
            **_LATENT,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
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
