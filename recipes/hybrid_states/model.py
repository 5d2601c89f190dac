"""Tiny hybrid model of Qwen3.5's layers: two attention layers and two gated delta networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3_5ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.prompts.tokenization import BlockTokenizer

STATE, ATTENTION = "linear_attention", "full_attention"
LAYERS = (STATE, ATTENTION, STATE, ATTENTION)
SINK = "head:4"
"""Sink: the fixed head that passages are encoded after."""

_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def sink_of(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the token ids of the sink."""
    return sink_ids(SINK, BlockTokenizer(tokenizer))


def build_model(base: PreTrainedModel, seed: int = 0) -> Qwen3_5ForCausalLM:
    """Create a hybrid model with the bundled model's dimensions, and with copies of its embeddings,
    norms, MLPs and attention layers. The gated delta networks are initialized randomly."""
    own: Any = base.config
    settings: dict[str, Any] = {name: getattr(own, name) for name in _SHARED}
    config = Qwen3_5TextConfig(
        **settings,
        layer_types=list(LAYERS),
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        rope_parameters={
            **own.rope_parameters,
            "partial_rotary_factor": 1.0,
            "mrope_section": [own.head_dim // 2, 0, 0],
        },
    )
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(base.model.embed_tokens.weight)
        model.lm_head.weight.copy_(base.lm_head.weight)
        _copy_norm(model.model.norm, base.model.norm)
        for layer, other in zip(model.model.layers, base.model.layers, strict=True):
            layer.mlp.load_state_dict(other.mlp.state_dict())
            _copy_norm(layer.input_layernorm, other.input_layernorm)
            _copy_norm(layer.post_attention_layernorm, other.post_attention_layernorm)
            if hasattr(layer, "linear_attn"):
                _set_state_layer(layer.linear_attn)
            else:
                _copy_attention(layer.self_attn, other.self_attn)
    return model


def attention_of(base: PreTrainedModel) -> Callable[[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return a function that maps ids ``[b, n]`` to the inputs and outputs ``[b, n, hidden]`` of
    each attention layer of ``base``."""
    found: list[tuple[Tensor, Tensor]] = []
    for layer in base.model.layers:
        layer.self_attn.register_forward_hook(
            lambda _, __, kwargs, outputs: found.append((kwargs["hidden_states"], outputs[0])),
            with_kwargs=True,
        )

    @torch.no_grad()
    def traced(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        found.clear()
        base.model(input_ids=ids, use_cache=False)
        return list(found)

    return traced


def _copy_norm(norm: Any, other: Any) -> None:
    norm.weight.copy_(other.weight - 1)  # Qwen3.5 scales by 1 + weight


def _copy_attention(attention: Any, other: Any) -> None:
    """Copy the projections. The initial output gate is one half, so outputs are doubled. The norms
    of queries and keys are removed, because they would make all heads equally sharp."""
    attention.q_norm = attention.k_norm = nn.Identity()
    queries = attention.q_proj.weight.unflatten(0, (-1, 2, attention.head_dim))
    queries[:, 0] = other.q_proj.weight.unflatten(0, (-1, attention.head_dim))
    queries[:, 1] = 0
    attention.k_proj.weight.copy_(other.k_proj.weight)
    attention.v_proj.weight.copy_(other.v_proj.weight)
    attention.o_proj.weight.copy_(2 * other.o_proj.weight)


def _set_state_layer(mixer: Any) -> None:
    """Initialize a gated delta network as in flash-linear-attention, with memory lengths of 1 to
    1,000 tokens or more. With transformers' initialization, most heads forget after one token."""
    steps = torch.exp(torch.empty_like(mixer.dt_bias).uniform_(math.log(1e-3), math.log(0.1)))
    mixer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))
    for projection in (mixer.in_proj_qkv, mixer.in_proj_z):
        nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
    nn.init.normal_(mixer.conv1d.weight, std=0.3)
    mixer.conv1d.weight[:, 0, -1] += 0.7  # initially, mostly pass on the current token
