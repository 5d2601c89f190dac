"""An engine whose answers are written by the test: the model computes all, and is told what to say.

Prompts, blocks, caches and figures are the real ones, so that agents can be tested whose steps no
small model would take by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from transformers import LogitsProcessor

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.pending import LatePrompt, PendingRequest
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Span
from blockattn_rag.store import KVStore, MemoryStore
from tests.engines import tuned_model
from tests.models import tiny_tokenizer

TOOL_TEMPLATE = """
{{- bos_token }}
{%- if tools %}
    {{- '<|system|>\\nCall tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>:' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|user|>\\n<tool_response>\\n' + message.content + '\\n</tool_response><|end|>\\n' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""
"""A chat template of the tests' control tokens whose tools are in Hermes' form."""

_FAVOR = 1e4

Script = Callable[[str], str | list[Span]]
"""From a prompt's text, control tokens included, to the answer. A string is what a template would
write, control tokens parsed; a quotation is a span of another origin."""


@lru_cache(maxsize=1)
def tool_model() -> BlockModel:
    """A tiny random model whose chat template knows tools."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    return tuned_model(tokenizer, max_position_embeddings=32768, num_hidden_layers=1)


class ScriptedEngine(BlockAttentionEngine):
    """An engine that answers as a script says.

    Args:
        script: from the prompt's text to the answer's.
        store: as for any engine.
        model: the model; default: a tiny random one that knows tools.

    Attributes:
        prompts: the texts of the prompts that were answered.
    """

    def __init__(
        self, script: Script, store: KVStore | None = None, model: BlockModel | None = None
    ) -> None:
        super().__init__(model or tool_model(), store or MemoryStore(1 << 28))
        self.script = script
        self.prompts: list[str] = []

    def _pending(
        self, prompt: LatePrompt, options: Mapping[str, Any], **scheduling: Any
    ) -> PendingRequest:
        told = Told(self.model, self.script, self.prompts)
        return super()._pending(prompt, {**options, "logits_processor": [told]}, **scheduling)


def prompts_of(model: Any) -> list[str]:
    """Prompts that the scripted engine of a framework's model answered."""
    assert isinstance(model.engine, ScriptedEngine)
    return model.engine.prompts


class Told(LogitsProcessor):
    """Favors the next token of a script's answer so much that only a grammar can forbid it.

    Args:
        model: what answers one prompt.
        script: what it says.
        prompts: takes the text of the prompt.
    """

    def __init__(self, model: BlockModel, script: Script, prompts: list[str]) -> None:
        self._model = model
        self._script = script
        self._prompts = prompts
        self._ids: list[int] = []
        self._start = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokenizer = self._model.tokenizer
        if not self._ids:
            self._start = input_ids.shape[1]
            prompt = tokenizer.tokenizer.decode(input_ids[0], skip_special_tokens=False)
            self._prompts.append(prompt)
            told = self._script(prompt)
            spans = [Span(told, "template")] if isinstance(told, str) else told
            self._ids = [*tokenizer.final_ids(spans, first=False), min(self._model.end_token_ids)]
        at = input_ids.shape[1] - self._start
        token = self._ids[min(at, len(self._ids) - 1)]
        forced = scores.clone()
        forced[:, token] += _FAVOR
        return forced
