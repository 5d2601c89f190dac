"""A tiny engine whose tokens are counted words."""

from __future__ import annotations

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.evaluation.efficiency.shapes import counting_tokenizer, random_llama


def tiny_engine(max_tokens: int = 256) -> BlockAttentionEngine:
    model = random_llama("tiny", max_tokens=max_tokens, device="cpu")
    tokenizer = counting_tokenizer(512)
    return BlockAttentionEngine.from_pretrained(model, tokenizer=tokenizer, resident_bytes=0)
