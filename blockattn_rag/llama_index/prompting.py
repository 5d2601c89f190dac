"""Conversion of LlamaIndex prompts (strings or chat messages) to blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt as generic_messages_to_prompt,
)
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms.llm import LLM, default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate

from blockattn_rag.adapters.exchange import template_messages, template_variables
from blockattn_rag.adapters.sources import EngineSource
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.llama_index.messages import chat_turns
from blockattn_rag.llama_index.source import SourceComponent
from blockattn_rag.output import tool_template
from blockattn_rag.output.tool_use import ToolUse, prompt_spans
from blockattn_rag.prompts.blocks import BlockPrompt, BlockTemplate, Span
from blockattn_rag.prompts.chat_template import has_chat_template, trace
from blockattn_rag.prompts.markers import close_cut_passages, strip_markers
from blockattn_rag.prompts.recognition import Recognize

PromptLike = str | Sequence[ChatMessage]

PROMPT_OPTIONS = ("chat_template_kwargs", "parse_special_tokens")
"""Call options, also in ``generate_kwargs``, that affect the prompt. Others go to the engine."""


class PromptMaking(SourceComponent, LLM):
    """LLM that converts prompts to blocks. For the fields, see ``BlockAttentionLLM``."""

    block_template: BlockTemplate
    recognize: Recognize
    is_chat_model: bool | None = None
    is_function_calling_model: bool | None = None
    generate_kwargs: dict[str, Any]

    _source: EngineSource = PrivateAttr()

    @property
    def source(self) -> EngineSource:
        return self._source

    @property
    def engine(self) -> BlockAttentionEngine:
        return self._source.engine

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text without block markers and BOS, to count its tokens."""
        return self._source.tokenizer.text_ids(strip_markers(text))

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        return super()._get_prompt(prompt, **with_whole_passages(prompt_args))

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        return super()._get_messages(prompt, **with_whole_passages(prompt_args))

    def filled(self, prompt: BasePromptTemplate, **variables: str) -> BlockPrompt:
        """Fill a prompt template with variables, as ``predict`` does, and return its blocks."""
        fill = self._get_messages if self._takes_chat else self._get_prompt
        return self.to_prompt(fill(prompt, **variables))

    def prompt_tokens(self, prompt: BasePromptTemplate, **variables: str) -> int:
        return len(self._source.tokenizer.prompt_ids(self.filled(prompt, **variables)).flat)

    def to_prompt(
        self,
        prompt: PromptLike,
        formatted: bool = True,
        *,
        tools: ToolUse | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special_tokens: bool | None = None,
    ) -> BlockPrompt:
        """Convert a prompt string or chat messages to blocks.

        Args:
            formatted: Whether the string is already formatted with the chat template.
            chat_template_kwargs, parse_special_tokens: Override the values in ``generate_kwargs``.

        Raises:
            ValueError: The prompt's template does not support the tools or one of
                ``chat_template_kwargs``, or a message has content other than text.
        """
        variables = template_variables(self, chat_template_kwargs)
        own_format: Any = self.completion_to_prompt
        if parse_special_tokens is None:
            parse_special_tokens = self.generate_kwargs.get("parse_special_tokens", False)
        spans: Iterable[Span]
        if not isinstance(prompt, str):
            spans = self._chat_spans(prompt, tools, variables)
        elif formatted:
            spans = self._source.string_spans(prompt, parse_special_tokens=parse_special_tokens)
        elif own_format not in (None, default_completion_to_prompt):
            turn = {"role": "user", "content": prompt}
            spans = trace(lambda turns: own_format(turns[0]["content"]), [turn])
        elif self._takes_chat:
            message = ChatMessage(role=MessageRole.USER, content=prompt)
            spans = self._chat_spans(self._extend_messages([message]), None, variables)
        else:
            text = self._extend_prompt(prompt)
            spans = self._source.string_spans(text, parse_special_tokens=parse_special_tokens)
        return self._source.prompt_of(spans, self.block_template, recognize=self.recognize)

    @property
    def _takes_chat(self) -> bool:
        if self.is_chat_model is not None:
            return self.is_chat_model
        return has_chat_template(self._source.tokenizer.tokenizer)

    @property
    def _own_template(self) -> Any:
        """The user's ``messages_to_prompt``, which replaces the chat template, or None."""
        own: Any = self.messages_to_prompt
        return None if own is generic_messages_to_prompt else own

    @property
    def _takes_tools(self) -> bool:
        if self.is_function_calling_model is not None:
            return self.is_function_calling_model
        if self._own_template or not self._takes_chat:
            return False
        return tool_template(self._source.tokenizer.tokenizer) is not None

    def _chat_spans(
        self, messages: Sequence[ChatMessage], tools: ToolUse | None, variables: dict[str, Any]
    ) -> tuple[Span, ...]:
        tokenizer = self._source.tokenizer.tokenizer
        if self._own_template and variables:
            raise ValueError(
                "chat_template_kwargs contains variables of the model's chat template, but "
                "messages_to_prompt replaces the template; pass only one of the two"
            )
        turns = template_messages(chat_turns(messages))
        if has_chat_template(tokenizer) and not self._own_template:
            return prompt_spans(tokenizer, turns, tools, **variables)
        if tools is not None:
            raise ValueError(
                "Tools require the model's chat template, but messages_to_prompt replaces the "
                "template; pass only one of the two"
            )

        def render(turns: Sequence[Mapping[str, Any]]) -> str:
            copies = []
            for message, turn in zip(messages, turns, strict=True):
                extra = turn["additional_kwargs"]
                shown = {"blocks": [TextBlock(text=turn["content"])], "additional_kwargs": extra}
                copies.append(message.model_copy(update=shown))
            return str((self._own_template or generic_messages_to_prompt)(copies))

        # messages_to_prompt may also render additional_kwargs, which are as untrusted as the
        # messages.
        pairs = zip(turns, messages, strict=True)
        return trace(render, [{**t, "additional_kwargs": m.additional_kwargs} for t, m in pairs])


def with_whole_passages(prompt_args: dict[str, Any]) -> dict[str, Any]:
    """Restore the markers of passages that LlamaIndex's prompt helper cut, except in the question.
    After the template is filled, the start and end of a piece can no longer be found."""
    return {
        name: close_cut_passages(value) if isinstance(value, str) and name != "query_str" else value
        for name, value in prompt_args.items()
    }
