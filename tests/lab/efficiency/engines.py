"""A tiny engine whose tokens are counted words."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.lab.efficiency.shapes import counting_tokenizer, random_llama


def tiny_engine(max_tokens: int = 256) -> BlockAttentionEngine:
    model = random_llama("tiny", max_tokens=max_tokens, device="cpu")
    tokenizer = counting_tokenizer(512)
    return BlockAttentionEngine.from_pretrained(model, tokenizer=tokenizer, resident_bytes=0)


def repeating_engine(max_tokens: int = 256) -> BlockAttentionEngine:
    """One whose answers are the same sentence, again and again."""
    model: Any = random_llama("tiny", max_tokens=max_tokens, device="cpu")
    words = counting_tokenizer(512).backend_tokenizer.to_str().replace('"t7"', '"It is so."')
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=Tokenizer.from_str(words), pad_token="t0")
    engine = BlockAttentionEngine.from_pretrained(model, tokenizer=tokenizer, resident_bytes=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()
        model.get_input_embeddings().weight.fill_(1)
        model.get_output_embeddings().weight[7] = 1
    return engine
