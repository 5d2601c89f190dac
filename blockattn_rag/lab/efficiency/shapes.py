"""Models for benchmarks: Llama shapes with random weights, and a tokenizer of numbered words."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from blockattn_rag.model.loading import default_device
from blockattn_rag.prompts.blocks import Block, BlockPrompt

_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
_VALUES = {
    "tiny": (2, 32, 4, 2, 8, 64, 512),  # small enough for tests
    "135m": (30, 576, 9, 3, 64, 1536, 49152),  # SmolLM2-135M
    "1b": (16, 2048, 32, 8, 64, 8192, 128256),  # Llama-3.2-1B
    "8b": (32, 4096, 32, 8, 128, 14336, 128256),  # Llama-3-8B
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    shape: dict(zip(_FIELDS, values, strict=True)) for shape, values in _VALUES.items()
}
"""Values for ``LlamaConfig``, by name."""


def shape_config(shape: str, **settings: Any) -> Any:
    """Create the transformers config of a shape."""
    return LlamaConfig(**SHAPES[shape], **settings)


def floating_type(name: str) -> torch.dtype:
    """Look up a floating-point type of PyTorch by name."""
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"dtype must name a floating type such as bfloat16, found {name!r}")
    return kind


def check_sizes(**sizes: int) -> None:
    """Raise ``ValueError`` for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}")


def random_llama(
    shape: str, *, max_tokens: int, device: str = "auto", dtype: str = "float32", seed: int = 0
) -> PreTrainedModel:
    """Create a Llama with random weights, which is as fast and as large as a trained model.

    Args:
        shape: Key of :data:`SHAPES`.
        max_tokens: Size of the context window.
        device: Torch device. ``"auto"``: an accelerator if there is one.
        dtype: Name of a torch floating type.
        seed: Random seed of the weights.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    kind = floating_type(dtype)
    config = shape_config(shape, max_position_embeddings=max_tokens)
    # Without end and padding tokens, every answer has its full length and no padding.
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    with torch.random.fork_rng(), torch.device(default_device() if device == "auto" else device):
        torch.manual_seed(seed)
        factory: Any = AutoModelForCausalLM
        model: PreTrainedModel = factory.from_config(config, dtype=kind).eval()
    return model


def counting_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Create a tokenizer that maps each word ``t0``, ``t1``, ... to the token id in its name."""
    words = {f"t{i}": i for i in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    factory: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = factory(tokenizer_object=backend, pad_token="t0")
    return tokenizer


def random_text(num_tokens: int, vocab_size: int, rng: random.Random) -> str:
    """Random text of exactly ``num_tokens`` tokens of the counting tokenizer, without t0."""
    return " ".join(f"t{rng.randrange(1, vocab_size)}" for _ in range(num_tokens))


def random_prompt(
    context_tokens: int, block_tokens: int, question_tokens: int, vocab_size: int, seed: int = 0
) -> BlockPrompt:
    """Random prompt with exactly these numbers of tokens. The last context block may be shorter."""
    rng = random.Random(f"{seed}/{context_tokens}/{block_tokens}")
    starts = range(0, context_tokens, block_tokens)
    sizes = [min(block_tokens, context_tokens - start) for start in starts]
    blocks = tuple(Block(random_text(size, vocab_size, rng)) for size in sizes)
    return BlockPrompt(blocks, random_text(question_tokens, vocab_size, rng))


def prefill_flops(config: Any, new_tokens: int, cached_tokens: int = 0) -> float:
    """Floating-point operations of a causal prefill that yields one token's logits.

    Counts the matrix products of linear layers, attention and the output layer, with two operations
    per multiply-add. Each token attends to the cached tokens and to the new tokens up to itself.

    Args:
        config: Config of a Llama-like transformers model (gated feed-forward layers). Only the
            active experts are counted.
        new_tokens: Tokens to compute.
        cached_tokens: Tokens whose keys and values are cached.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)  # q and output, k and v
    weights = attention + 3 * hidden * _active_width(config)
    pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2
    layer = 2 * new_tokens * weights + 4 * heads * head_dim * pairs
    return float(config.num_hidden_layers * layer + 2 * hidden * config.vocab_size)


def _active_width(config: Any) -> int:
    """Total width of the active experts in a feed-forward layer."""
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return int(config.intermediate_size)
    each = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return int(experts * each + (getattr(config, "shared_expert_intermediate_size", None) or 0))
