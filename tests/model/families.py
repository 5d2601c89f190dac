"""Tiny configs of model families that support block mode, and of families that do not."""

from __future__ import annotations

from typing import Any


def _rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **settings}}


LONGROPE_LIMIT = 512
_GPT = {"n_layer": 2, "n_head": 4, "n_embd": 32}
_WINDOW = {"sliding_window": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.0, 3.0, 4.0]}

SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, llama3": (
        "llama",
        _rope(rope_type="llama3", original_max_position_embeddings=64, **_LLAMA3),
    ),
    "llama, linear": ("llama", _rope(rope_type="linear", factor=4.0)),
    "llama, yarn": (
        "llama",
        _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, sliding window": ("mistral", _WINDOW),
    "mixtral": ("mixtral", {**_EXPERTS, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", _WINDOW),
    "gemma3": ("gemma3_text", {**_WINDOW, "num_hidden_layers": 7}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {}),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": LONGROPE_LIMIT,
            **_rope(
                rope_type="longrope", original_max_position_embeddings=LONGROPE_LIMIT, **_LONGROPE
            ),
        },
    ),
    "ministral3": ("ministral3", {}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "stablelm": ("stablelm", {}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {**_WINDOW, "num_hidden_layers": 4}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**_WINDOW, "num_hidden_layers": 4}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "granite": ("granite", {}),
    "starcoder2": ("starcoder2", {}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "falcon, one key head": ("falcon", {"multi_query": True, "alibi": False}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "gpt_oss, attention sinks": ("gpt_oss", {**_WINDOW, **_EXPERTS, "num_hidden_layers": 4}),
}
_ROTARY = "not plain rotary"
_ALIBI = "ALiBi"
_NOTHING = "no attention layer with keys and values"

# Family: model type, config, and expected error message.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("gpt2", {**_GPT, "bos_token_id": 0, "eos_token_id": 0}, _ROTARY),
    "opt": ("opt", {"word_embed_proj_dim": 32}, _ROTARY),
    "llama, dynamic": ("llama", _rope(rope_type="dynamic", factor=4.0), "type is 'dynamic'"),
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4}, _ALIBI),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, _ALIBI),
    "falcon, alibi": ("falcon", {"multi_query": False, "alibi": True}, _ALIBI),
    "mamba": ("mamba", {}, _NOTHING),
    "recurrent_gemma": ("recurrent_gemma", {}, _ROTARY),
    "trocr": ("trocr", {"d_model": 32, "decoder_layers": 2}, "counts positions by itself"),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 2,
            "attention_chunk_size": 16,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 32,
        },
        "is chunked",
    ),
    "gemma3, bidirectional": (
        "gemma3_text",
        {**_WINDOW, "num_hidden_layers": 7, "use_bidirectional_attention": True},
        "is not causal",
    ),
}

# Families with other kinds of layers: model type, config, and the kinds of layers of a miniature.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "windows": ("gemma3_text", {}, "5 windowed attention, 1 attention"),
    "windows only": ("mistral", {}, "3 windowed attention"),
    "windows and soft caps": (
        "gemma2",
        {"attn_logit_softcapping": 0.1},
        "1 windowed attention, 1 attention",
    ),
    "windows and sinks": ("gpt_oss", {}, "1 windowed attention, 1 attention"),
    "windows with other heads": ("mimo_v2_flash", {}, "1 attention, 1 windowed attention"),
    "scaled queries": ("ministral3", {}, "3 attention"),
    "shared": ("gemma3n_text", {}, "4 windowed attention, 1 attention, 5 shared attention"),
    "shared, last tokens only": (
        "gemma4_text",
        {"num_kv_shared_layers": 10},
        "5 windowed attention, 1 attention, 6 shared attention",
    ),
    "latent": ("deepseek_v3", {}, "3 latent attention"),
    "latent, interleaved": ("deepseek_v2", {"num_experts_per_tok": 2}, "3 latent attention"),
    "state": ("qwen3_5_text", {}, "3 state, 1 attention"),
    "state of convolutions": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 16},
        "1 state, 1 attention",
    ),
    "attention and state": ("falcon_h1", {}, "2 attention and state"),
    "latent and state": ("kimi_linear", {}, "4 state, 1 latent attention"),
    "windows and state": ("lfm3", {}, "3 state, 1 attention, 1 windowed attention"),
    "no positions": ("nemotron_h", {}, "1 state, 2 no cache, 1 attention"),
    "state of single tokens": ("jamba", {}, "4 state, 1 attention"),
}
