"""Models with random weights, a tokenizer for numbered words, and random prompts."""

from __future__ import annotations

import random
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    MiniCPM3Config,
    MinistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from blockattn_rag.lab.planning import SHAPES, floating_type, shape_config
from blockattn_rag.model.loading import default_device
from blockattn_rag.prompts.blocks import Block, BlockPrompt

Kind = Literal["plain", "latent", "hybrid"]
"""Layer type of a model: as in Llama, multi-head latent attention, or a hybrid of layers with a
recurrent state and, as every fourth and the last layer, attention."""


def random_llama(
    shape: str,
    *,
    max_tokens: int,
    device: str = "auto",
    dtype: str = "float32",
    seed: int = 0,
    window: int | None = None,
    kind: Kind = "plain",
) -> PreTrainedModel:
    """Create a model with random weights. Its speed and size equal those of a trained model.

    Args:
        shape: Name of the shape, a key of ``SHAPES``.
        max_tokens: Size of the context window.
        device: Torch device. ``"auto"``: an accelerator if one is available.
        dtype: Name of a torch floating-point type.
        seed: Random seed for the weights.
        window: Sliding window in tokens for five of six layers, as in Gemma 3. None: no windows.
        kind: Layer type. ``"latent"``: as in MiniCPM3. ``"hybrid"``: as in Qwen3.5. Windows
            require ``"plain"``.
    """
    if shape not in SHAPES:
        raise ValueError(f"Unknown shape {shape!r}: expected one of {', '.join(SHAPES)}.")
    number = floating_type(dtype)
    config: Any = shape_config(shape, max_position_embeddings=max_tokens)
    if window is not None:  # Ministral is a Llama with layer types.
        types = ["sliding_attention"] * 5 + ["full_attention"]
        layers = range(config.num_hidden_layers)
        config = MinistralConfig(
            **SHAPES[shape],
            max_position_embeddings=max_tokens,
            rope_parameters=config.rope_parameters,
            sliding_window=window,
            layer_types=[types[layer % len(types)] for layer in layers],
        )
    if kind != "plain":
        config = _config(kind, shape, max_tokens)
    # Without end and padding tokens, every answer reaches its maximum length without padding.
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    with torch.random.fork_rng(), torch.device(default_device() if device == "auto" else device):
        torch.manual_seed(seed)
        factory: Any = AutoModelForCausalLM
        model: PreTrainedModel = factory.from_config(config, dtype=number).eval()
    return model


def _config(kind: Kind, shape: str, max_tokens: int) -> Any:
    sizes = {**SHAPES[shape], "max_position_embeddings": max_tokens}
    heads, size = sizes["num_attention_heads"], sizes["head_dim"]
    if kind == "hybrid":
        states = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
        states |= {"linear_key_head_dim": size, "linear_value_head_dim": size}
        layers = sizes["num_hidden_layers"]
        every = min(4, layers)
        types = ["linear_attention"] * (every - 1) + ["full_attention"]
        types = [types[layer % every] for layer in range(layers)]
        return Qwen3_5TextConfig(**sizes, **states, layer_types=types)
    del sizes["head_dim"], sizes["num_key_value_heads"]
    ranks = {"kv_lora_rank": 4 * size, "q_lora_rank": 4 * size}
    parts = {"qk_nope_head_dim": size, "qk_rope_head_dim": size // 2, "v_head_dim": size}
    return MiniCPM3Config(**sizes, **ranks, **parts, num_key_value_heads=heads)


def counting_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Create a tokenizer that maps each word ``t0``, ``t1``, ... to the token id in its name."""
    words = {f"t{i}": i for i in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    factory: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = factory(tokenizer_object=backend, pad_token="t0")
    return tokenizer


def random_text(num_tokens: int, vocab_size: int, rng: random.Random) -> str:
    """Return random text with exactly ``num_tokens`` tokens of the counting tokenizer, not t0."""
    return " ".join(f"t{rng.randrange(1, vocab_size)}" for _ in range(num_tokens))


def random_prompt(
    context_tokens: int, block_tokens: int, question_tokens: int, vocab_size: int, seed: int = 0
) -> BlockPrompt:
    """Return a random prompt with these exact lengths. The last context block may be shorter."""
    rng = random.Random(f"{seed}/{context_tokens}/{block_tokens}")
    starts = range(0, context_tokens, block_tokens)
    sizes = [min(block_tokens, context_tokens - start) for start in starts]
    blocks = tuple(Block(random_text(size, vocab_size, rng)) for size in sizes)
    return BlockPrompt(blocks, random_text(question_tokens, vocab_size, rng))
