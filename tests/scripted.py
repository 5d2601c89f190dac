"""An engine with scripted answers: the model runs as usual, but its tokens are forced. Prompts,
blocks, caches and statistics are real. This makes it possible to test agents whose steps are too
difficult for small models."""

from __future__ import annotations

import json
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
"""Chat template with the tests' control tokens, and tools in the format of Hermes."""

_FAVOR = 1e4

Script = Callable[[str], str | list[Span]]
"""Function from the text of a prompt, including control tokens, to the answer. Control tokens are
parsed in strings; quotations are spans with another origin."""


@lru_cache(maxsize=1)
def tool_model() -> BlockModel:
    """Return a tiny random model whose chat template supports tools."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    return tuned_model(tokenizer, max_position_embeddings=32768, num_hidden_layers=1)


def call_of(name: str, arguments: dict[str, Any]) -> str:
    """Return a tool call in the format of the template."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


class ScriptedEngine(BlockAttentionEngine):
    """Engine that answers according to a script.

    Args:
        script: Function from the text of the prompt to the answer.
        store: Store of the engine.
        model: Model. Default: a tiny random model that supports tools.

    Attributes:
        prompts: Texts of all prompts.
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
    """Return the prompts of the scripted engine behind a model of a framework."""
    assert isinstance(model.engine, ScriptedEngine)
    return model.engine.prompts


class Told(LogitsProcessor):
    """Forces the tokens of a scripted answer. Only a grammar can override them.

    Args:
        model: Model that answers one prompt.
        script: Script of the answer.
        prompts: List that the text of the prompt is appended to.
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
