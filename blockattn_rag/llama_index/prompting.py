"""The prompts of the LLM: strings and chat messages of LlamaIndex as blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt as generic_messages_to_prompt,
)
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.llm import LLM, default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate

from blockattn_rag.llama_index.chat import as_template_messages
from blockattn_rag.llama_index.source import EngineComponent
from blockattn_rag.output import tool_template
from blockattn_rag.output.tool_use import ToolUse, prompt_spans
from blockattn_rag.prompts.blocks import BlockPrompt, BlockTemplate, Span
from blockattn_rag.prompts.chat_template import check_template_kwargs, has_chat_template, trace
from blockattn_rag.prompts.marked_text import close_cut_passages
from blockattn_rag.prompts.markers import strip_markers

PromptLike = str | Sequence[ChatMessage]

PROMPT_OPTIONS = ("chat_template_kwargs", "parse_special_tokens")
"""Options of a call, or of ``generate_kwargs``, that shape the prompt; the engine gets the rest."""


class PromptMaking(EngineComponent, LLM):
    """What an LLM makes of prompts that are strings or messages; for the fields see
    ``BlockAttentionLLM``."""

    block_template: BlockTemplate = Field(description="What stands around each passage.")
    is_chat_model: bool | None = Field(description="None: whether there is a chat template.")
    is_function_calling_model: bool | None = Field(description="None: whether that takes tools.")
    generate_kwargs: dict[str, Any] = Field(description="Defaults of every call.")

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text without its markers and without BOS: for counting tokens."""
        return self._source.tokenizer.text_ids(strip_markers(text))

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        return super()._get_prompt(prompt, **_with_whole_passages(prompt_args))

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        return super()._get_messages(prompt, **_with_whole_passages(prompt_args))

    def filled(self, prompt: BasePromptTemplate, **variables: str) -> BlockPrompt:
        """The blocks that a prompt template becomes with these variables, as in ``predict``."""
        fill = self._get_messages if self._takes_chat else self._get_prompt
        return self.to_prompt(fill(prompt, **variables))

    def to_prompt(
        self,
        prompt: PromptLike,
        formatted: bool = True,
        *,
        tools: ToolUse | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special_tokens: bool | None = None,
    ) -> BlockPrompt:
        """The blocks that a prompt string, or chat messages, become.

        Args:
            prompt: a string, or messages.
            formatted: the string is the model's own prompt, chat template included.
            tools: that the model may call after messages.
            chat_template_kwargs: variables of the chat template, beside those of
                ``generate_kwargs``.
            parse_special_tokens: whether control tokens are parsed in a string. Default: as
                ``generate_kwargs`` says.

        Raises:
            ValueError: the model's chat template does not read one of ``chat_template_kwargs``.
        """
        own = self.generate_kwargs
        given = {**(own.get("chat_template_kwargs") or {}), **(chat_template_kwargs or {})}
        variables = check_template_kwargs(self._source.tokenizer.tokenizer, given)
        if parse_special_tokens is None:
            parse_special_tokens = own.get("parse_special_tokens", False)
        spans = self._spans(prompt, formatted, tools, variables, parse_special_tokens)
        return BlockPrompt.from_spans(spans, self.block_template)

    def _spans(
        self,
        prompt: PromptLike,
        formatted: bool,
        tools: ToolUse | None,
        variables: dict[str, Any],
        parse_special_tokens: bool,
    ) -> Iterable[Span]:
        """A prompt by who wrote what; ``variables`` are those of the chat template."""
        to_prompt: Any = self.completion_to_prompt
        if not isinstance(prompt, str):
            return self._chat_spans(prompt, tools, variables)
        if not formatted and to_prompt not in (None, default_completion_to_prompt):
            turn = {"role": "user", "content": prompt}
            return trace(lambda turns: to_prompt(turns[0]["content"]), [turn])
        if not formatted and self._takes_chat:
            message = ChatMessage(role=MessageRole.USER, content=prompt)
            return self._chat_spans(self._extend_messages([message]), None, variables)
        return self._source.string_spans(
            prompt if formatted else self._extend_prompt(prompt),
            parse_special_tokens=parse_special_tokens,
        )

    @property
    def _takes_chat(self) -> bool:
        """Whether prompts are chat messages."""
        if self.is_chat_model is not None:
            return self.is_chat_model
        return has_chat_template(self._source.tokenizer.tokenizer)

    @property
    def _own_template(self) -> Any:
        """``messages_to_prompt`` of the user, in the place of the chat template; or None."""
        given: Any = self.messages_to_prompt
        return None if given is generic_messages_to_prompt else given

    @property
    def _takes_tools(self) -> bool:
        """Whether the model can be told of tools: by its chat template, and no function instead."""
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
                "chat_template_kwargs are variables of the model's chat template, and "
                "messages_to_prompt takes its place; give one of the two"
            )
        if has_chat_template(tokenizer) and not self._own_template:
            return prompt_spans(tokenizer, as_template_messages(messages), tools, **variables)
        if tools is not None:
            raise ValueError(
                "tools are shown by the model's chat template, and messages_to_prompt takes its "
                "place; give one of the two"
            )
        turns = as_template_messages(messages)

        def render(given: Sequence[Mapping[str, Any]]) -> str:
            copies = []
            for message, turn in zip(messages, given, strict=True):
                extra = turn["additional_kwargs"]
                shown = {"blocks": [TextBlock(text=turn["content"])], "additional_kwargs": extra}
                copies.append(message.model_copy(update=shown))
            return str((self._own_template or generic_messages_to_prompt)(copies))

        # The function may show additional_kwargs too, which others than the user wrote.
        pairs = zip(turns, messages, strict=True)
        return trace(render, [{**t, "additional_kwargs": m.additional_kwargs} for t, m in pairs])


def _with_whole_passages(prompt_args: dict[str, Any]) -> dict[str, Any]:
    """The variables of a prompt template. LlamaIndex's own prompt helper cuts long passages: here,
    and nowhere later, it is known where the pieces begin and end."""
    return {
        name: close_cut_passages(value) if isinstance(value, str) and name != "query_str" else value
        for name, value in prompt_args.items()
    }
