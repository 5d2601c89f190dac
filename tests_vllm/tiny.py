"""Tiny random checkpoints with kinds of layers that the bundled model does not have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

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
    # Marked as block-fine-tuned, so that it needs no recipe.
    "block_attention": {"modes": ["block", "full"], "positions": "reordered", "version": 1},
}
WINDOW = 65
_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    # vLLM requires the full layer before the shared layers to be the last one of its kind.
    "layer_types": [*_TYPES, *_TYPES[1:]],
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 1202,
}
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "head_dim": 64,
    # The only sizes of latents and rotary keys that vLLM's CPU kernel supports.
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
    # As in published configs. transformers ignores both, but vLLM defaults to another router.
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_CPU = {"attention_backend": "CPU_MLA"}
"""Arguments of ``LLM``: the float32 backend, which vLLM does not select on CPUs with AMX."""
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


class Family(NamedTuple):
    """A transformers family and its config.

    Args:
        engine: Arguments of ``LLM`` for this family.
        page_tokens: Tokens per page, of the layers with windows if there are any.
    """

    name: str
    config: dict[str, Any]
    engine: dict[str, Any] | None = None
    page_tokens: int = 128

    @property
    def is_latent(self) -> bool:
        return "kv_lora_rank" in self.config


FAMILIES: dict[str, Family] = {
    "windows and sinks": Family(
        "gpt_oss",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "shared": Family(
        "gemma4_text",
        # Sizes of Gemma 4 E2B.
        {**_SHARED, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512},
        page_tokens=256,
    ),
    "shared, one size": Family(
        "gemma3n_text",
        {
            **_SHARED,
            "head_dim": 64,
            "laurel_rank": 16,
            "intermediate_size": [128] * 5,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0],
        },
    ),
    "latent": Family("deepseek_v3", {**_LATENT, "rope_parameters": _YARN}, _CPU),
    "latent, pairs": Family(
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "rope_parameters": _YARN,
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy",
        },
        _CPU,
    ),
    "latent, not scaled": Family(
        "glm4_moe_lite",
        {**_LATENT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {**_CPU, "compilation_config": {"custom_ops": ["-rotary_embedding"]}},
    ),
}
"""Families by their kinds of layers."""

REFUSED = {
    "expanded": Family(
        "minicpm3",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "head_dim": 96,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "q_lora_rank": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
"""Families that vLLM computes differently than transformers."""


def save(layers: str, folder: Path) -> Path:
    """Save a checkpoint of ``FAMILIES`` or ``REFUSED`` with the tokenizer of the bundled model. The
    variance of its weights makes attention far from uniform."""
    family, config, *_ = (FAMILIES | REFUSED)[layers]
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
