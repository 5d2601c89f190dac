"""BlockAttentionLLM: an LLM for LlamaIndex that reuses the KV of passages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.exchange import Exchange, tools_of
from blockattn_rag.adapters.sources import EngineSource
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike
from blockattn_rag.engine.results import Mode
from blockattn_rag.errors import ToolCallError
from blockattn_rag.llama_index.messages import INVALID_CALLS, Responses
from blockattn_rag.llama_index.prompting import PROMPT_OPTIONS, PromptLike, PromptMaking
from blockattn_rag.llama_index.structured_output import StructuredPrediction
from blockattn_rag.output.tool_use import ToolUse, without_tool_options
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.recognition import Recognize
from blockattn_rag.store import KVStore


class BlockAttentionLLM(PromptMaking, StructuredPrediction, CustomLLM, FunctionCallingLLM):
    """LLM that answers from cached passages with a transformers model in this process.

    Shares argument names with ``HuggingFaceLLM``, which it replaces. Passages between block markers
    (see ``BlockKVPostprocessor``) are looked up in the KV store by the digest of their text, and
    encoded on a cache miss. The rest of the prompt is ordinary text. The constructor loads the
    model.

    Args:
        model_name: Path, hub id, or ``"bundled"``.
        engine: An existing engine. Replaces the arguments for loading one.
        kv_store: KV store: a directory, an address such as ``"s3://bucket/kv"`` (see
            ``store.open_store``), or a store object. Default: 1 GiB in memory.
        recipe: Recipe for block mode, for models that are not block-fine-tuned: ``"auto"``,
            ``"none"``, or a folder written by ``blockattn-rag repair``. ``"auto"`` uses the best
            known recipe, such as the one next to the store.
        mode: ``"block"`` reuses passages; ``"full"`` uses ordinary attention over the same tokens.
        block_template: Text around each passage. ``BlockKVTransform`` must use the same template.
        recognize: Whether to also recognize ingested passages in text without markers, so that
            prompts need no postprocessor. ``"system"``: also in system messages.
        context_window: Maximum number of tokens, prompt and answer together. Default: the model's
            context window.
        max_new_tokens: Maximum number of tokens in an answer.
        generate_kwargs: Default options of all calls, such as ``temperature`` or ``stop``.
        model_kwargs: Arguments for loading the model, such as ``dtype``.
        device_map: A torch device, or ``"auto"``.
        llm_fields: LlamaIndex's own fields, such as ``system_prompt`` and ``callback_manager``,
            and ``tokenizer_name``. Default of ``messages_to_prompt``: the chat template. Default of
            ``completion_to_prompt`` for chat models: a single user message. Defaults of
            ``is_chat_model`` and ``is_function_calling_model``: whether there is a chat template,
            and whether it supports tools. Required calls, which a grammar enforces, work with any
            chat template.

    Calls, and ``generate_kwargs`` for all calls, accept ``max_new_tokens``, ``temperature``,
    ``top_p``, ``top_k``, ``stop``, ``seed``, ``mode``, ``recipe`` (for comparisons), the arguments
    of transformers' ``generate``, ``response_format``, ``structured_outputs``, and two prompt
    options. Other options raise an error.

    - ``chat_template_kwargs``: Variables of the chat template, such as ``enable_thinking``. Their
      values are trusted text in the prompt, so never take them from users.
    - ``parse_special_tokens=True``: Parses control tokens in prompt strings, outside of passages:
      those of the prompt template, but also those in a user's question.

    ``raw["usage"]`` of a response contains token counts and reuse statistics. For reasoning, see
    ``docs/guides/settings.md``, and for tools ``docs/guides/agents.md``.

    Raises:
        ContextOverflowError: Raised by calls if the prompt does not fit in the context window. With
            ``configure``, LlamaIndex packs passages to fit.
    """

    mode: Mode
    context_window: int | None
    max_new_tokens: int = Field(gt=0)

    def __init__(
        self,
        model_name: str | None = None,
        *,
        engine: BlockAttentionEngine | None = None,
        kv_store: KVStore | str | Path | None = None,
        recipe: RecipeLike = AUTO,
        mode: Mode = "block",
        block_template: BlockTemplate = BLANK_LINE,
        recognize: Recognize = False,
        context_window: int | None = None,
        max_new_tokens: int = 256,
        generate_kwargs: dict[str, Any] | None = None,
        model_kwargs: dict[str, Any] | None = None,
        device_map: str = "auto",
        **llm_fields: Any,
    ) -> None:
        check_known(type(self), llm_fields, [*type(self).model_fields, "engine"])
        source = EngineSource(
            engine,
            model_name=model_name,
            tokenizer_name=llm_fields.pop("tokenizer_name", None),
            kv_store=kv_store,
            device_map=device_map,
            model_kwargs=model_kwargs,
            recipe=recipe,
        )
        if recognize:
            source.check_recognizes()
        fields = {
            **source.fields(),
            "mode": mode,
            "block_template": block_template,
            "recognize": recognize,
            "context_window": context_window,
            "max_new_tokens": max_new_tokens,
            "generate_kwargs": generate_kwargs or {},
        }
        super().__init__(**fields, **llm_fields)
        self._source = source
        source.load()

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self.context_window or self.engine.model.max_context_tokens,
            num_output=self.max_new_tokens,
            is_chat_model=self._takes_chat,
            is_function_calling_model=self._takes_tools,
            model_name=self.model_name or "unknown",
        )

    def to_payload(self) -> dict[str, Any]:
        """Return fields for instrumentation events. Reads no files, so event loops can call it."""
        names = ("model_name", "mode", "recipe", "context_window", "max_new_tokens")
        return {"class_name": self.class_name(), **{name: getattr(self, name) for name in names}}

    def engine_options(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the engine options of a call. The call's options override the fields."""
        own = {"mode": self.mode, "max_new_tokens": self.max_new_tokens}
        options = {**own, **without_tool_options(self.generate_kwargs), **call}
        return {name: value for name, value in options.items() if name not in PROMPT_OPTIONS}

    def _exchange(
        self,
        prompt: PromptLike,
        call: dict[str, Any],
        formatted: bool = True,
        tools: ToolUse | None = None,
    ) -> Exchange:
        shaping = {name: call[name] for name in PROMPT_OPTIONS if name in call}
        make_prompt = partial(self.to_prompt, prompt, formatted, tools=tools, **shaping)
        return Exchange(self._source, make_prompt, self.engine_options(call), tools)

    def _chat_exchange(self, messages: Sequence[ChatMessage], call: dict[str, Any]) -> Exchange:
        tools = tools_of(self, call)
        return self._exchange(messages, without_tool_options(call), tools=tools)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return Responses().completion(self._exchange(prompt, kwargs, formatted).answer())

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        return self._exchange(prompt, kwargs, formatted).stream(Responses(streamed=True).completion)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        return Responses().completion(await self._exchange(prompt, kwargs, formatted).aanswer())

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        return self._exchange(prompt, kwargs, formatted).astream(
            Responses(streamed=True).completion
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return Responses().chat(self._chat_exchange(messages, kwargs).answer())

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._chat_exchange(messages, kwargs).stream(Responses(streamed=True).chat)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return Responses().chat(await self._chat_exchange(messages, kwargs).aanswer())

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        return self._chat_exchange(messages, kwargs).astream(Responses(streamed=True).chat)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        messages = [*(chat_history or ()), *([] if user_msg is None else [user_msg])]
        if tool_choice is None and tool_required:
            tool_choice = "required"
        return {
            "messages": messages,
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": tool_choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls of a response.

        Raises:
            ToolCallError: ``error_on_no_tool_call`` is True, and a call is missing or invalid.
        """
        message = response.message
        calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
        if error_on_no_tool_call:
            if invalid := message.additional_kwargs.get(INVALID_CALLS):
                reasons = "; ".join(f"{call['error']}: {call['text'][:200]!r}" for call in invalid)
                raise ToolCallError(f"The model generated an invalid tool call. {reasons}")
            if not calls:
                answer = (message.content or "")[:200]
                raise ToolCallError(
                    f"Expected a tool call, but the model answered {answer!r}. Pass "
                    "tool_required=True to enforce a call with a grammar"
                )
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=call.tool_kwargs if isinstance(call.tool_kwargs, dict) else {},
            )
            for call in calls
        ]
