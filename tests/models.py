"""Tiny random models and a tokenizer for tests."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 264
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 4096, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
}  # fmt: skip
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def tiny_tokenizer(*, bos: bool = True, chat: Any = True) -> PreTrainedTokenizerFast:
    """Tokenizer with one token per byte and eight control tokens. ``bos``: Whether to add BOS.
    ``chat``: Chat template, or whether to set the default one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    control = ["<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t in (*control, "<|doc_start|>", "<|doc_end|>")]
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 256)]
        )
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend,
        bos_token="<|begin|>" if bos else None,
        eos_token="<|end|>",
        pad_token="<|pad|>",
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE if chat is True else chat
    return tokenizer


@lru_cache
def marked_tokenizer(marks: tuple[str, ...], *, special: bool) -> Any:
    """``tiny_tokenizer`` with additional tokens. ``special``: Whether they are control tokens."""
    tokenizer = tiny_tokenizer()
    added: Any = [AddedToken(mark, special=special, normalized=False) for mark in marks]
    tokenizer.add_tokens(added, special_tokens=special)
    return tokenizer


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model and ``tiny_tokenizer`` to a folder. Returns the folder."""
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_model(family: str = "llama", *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a random float32 model of a transformers family, in evaluation mode. The variance of
    the weights makes attention far from uniform and greedy choices unambiguous."""
    settings = {**_BASE, **config}
    if family in ("falcon", "bloom", "mpt"):
        settings.pop("head_dim")
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.train(False)
    return model


@lru_cache(maxsize=1)
def shared_tiny_llama() -> PreTrainedModel:
    """Return the Llama that is shared by all tests that do not modify it."""
    return tiny_model("llama")
