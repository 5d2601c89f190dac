"""Options that force an answer of a random model, and chat templates with thoughts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor

from blockattn_rag.model import BlockModel
from tests.chat_templates import QWEN3
from tests.engines import tuned_model
from tests.models import tiny_tokenizer

THINKING_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def thinking_tokenizer() -> Any:
    """Return the tiny tokenizer with a chat template that renders thoughts."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING_TEMPLATE
    return tokenizer


def thinking_model(*, opens: bool) -> BlockModel:
    """Return a model with thoughts and tools. ``opens``: Whether its template opens thoughts."""
    tokenizer = tiny_tokenizer()
    opening = "{%- if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    tokenizer.chat_template = QWEN3 + (opening if opens else "")
    return tuned_model(tokenizer, max_position_embeddings=8192, num_hidden_layers=1)


def says(text: str) -> dict[str, Any]:
    """Return options that make a model with the tiny tokenizer answer with this text once."""
    return {"logits_processor": [_Says(text)], "max_new_tokens": len(text.encode()) + 1}


class _Says(LogitsProcessor):
    def __init__(self, text: str) -> None:
        tokenizer: Any = tiny_tokenizer()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        self._coming = iter([*ids, tokenizer.eos_token_id])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = torch.full_like(scores, -100.0)
        scores[:, next(self._coming)] = 100.0
        return scores
