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
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.engine_source import EngineSource
from blockattn_rag.adapters.exchange import Exchange, tools_of
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike
from blockattn_rag.engine.protocol import Engine
from blockattn_rag.engine.results import Mode
from blockattn_rag.llama_index.messages import (
    Responses,
    aresponses_of,
    responses_of,
    tool_selections,
)
from blockattn_rag.llama_index.prompting import PROMPT_OPTIONS, PromptLike, PromptMaking
from blockattn_rag.llama_index.structured_output import StructuredPrediction
from blockattn_rag.output.tool_use import ToolUse, without_tool_options
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.store import KVStore


class BlockAttentionLLM(PromptMaking, StructuredPrediction, CustomLLM, FunctionCallingLLM):
    """A transformers model, in this process or behind a server, that answers from cached passages.

    A replacement of ``HuggingFaceLLM`` with the same argument names. Passages between block markers
    (see ``BlockKVPostprocessor``) are looked up in the KV store by the digest of their text, and
    computed on a miss. The rest of the prompt is ordinary text. The model is loaded on first use.

    Args:
        model_name: Path, hub id, or ``"bundled"``.
        tokenizer_name: Where to load the tokenizer. Default: the model's.
        engine: A ready engine, in place of the arguments for loading one.
        kv_store: KV store: a directory, an address such as ``"s3://bucket/kv"`` (see
            ``store.open_store``), or a store object. Default: 1 GiB of memory.
        recipe: How a model that is not block-fine-tuned runs in block mode: ``"auto"``, ``"none"``,
            or the folder of a recipe, which ``blockattn-rag repair`` writes. ``"auto"`` uses the
            best known one, such as that next to the store.
        api_base: Address of a server with the model and the store (docs/guides/serving_vllm.md),
            such as ``"http://gpu:8000/v1"``; ``model_name`` is then its name there.
        api_key: API key of the server. Default: ``BLOCKATTN_RAG_API_KEY`` of the environment.
        mode: ``"block"`` reuses passages; ``"full"`` is ordinary attention over the same tokens.
        block_template: Text around each passage; must be that of ``BlockKVTransform``.
        context_window: Maximum number of tokens of prompt and answer. Default: the model's.
        max_new_tokens: Maximum number of tokens of an answer.
        generate_kwargs: Defaults of every call, such as ``temperature`` or ``stop``.
        model_kwargs: Arguments for loading the model, such as ``dtype``, or those of
            ``RemoteEngine``, such as ``timeout_s``.
        device_map: A torch device, or ``"auto"``.
        llm_fields: LlamaIndex's own fields: ``system_prompt``, ``callback_manager``,
            ``messages_to_prompt`` (default: the tokenizer's chat template),
            ``completion_to_prompt`` (for unformatted completions; default for chat models: one
            user message), ``is_chat_model`` (default: whether there is a chat template) and
            ``is_function_calling_model`` (default: whether the template supports tools). If the
            latter is True for a template without tools, required calls, such as those of Pydantic
            selectors, use a grammar, and others raise.

    Calls, and ``generate_kwargs`` for all calls, take ``max_new_tokens``, ``temperature``,
    ``top_p``, ``top_k``, ``stop``, ``seed``, ``mode``, ``recipe`` (for comparisons), the arguments
    of transformers' ``generate``, and two options of the prompt. Others raise.

    - ``chat_template_kwargs``: variables of the chat template, such as ``enable_thinking``. Their
      values become text of the template, so never take them from users.
    - ``parse_special_tokens=True`` parses control tokens in prompt strings, outside of passages,
      for prompt templates that write them. Questions in such strings can then write them too.

    Responses have token counts and figures of reuse in ``raw["usage"]``. Thoughts of models whose
    chat template marks them by ``<think>`` are a ``ThinkingBlock`` of the message, or
    ``additional_kwargs["thinking"]`` of a completion (``"thinking_delta"`` in a stream).

    If the chat template supports tools, this is a function calling LLM. ``tool_choice`` and
    ``tool_required=True`` enforce valid calls by a grammar, which needs the extra ``structured``.
    With ``tool_calls="constrained"``, of a call or in ``generate_kwargs``, a grammar decides
    between text and calls (docs/guides/agents.md).

    Raises:
        ContextOverflowError: (from a call) the prompt does not fit in the context window. Call
            ``configure``, so that LlamaIndex packs passages by ``context_window``, or retrieve
            fewer.
    """

    mode: Mode = Field(description="'block' reuses passages, 'full' is ordinary attention.")
    context_window: int | None = Field(description="Tokens of prompt and answer. None: all.")
    max_new_tokens: int = Field(description="Maximum tokens of an answer.", gt=0)

    def __init__(
        self,
        model_name: str | None = None,
        *,
        tokenizer_name: str | None = None,
        engine: Engine | None = None,
        kv_store: KVStore | str | Path | None = None,
        recipe: RecipeLike = AUTO,
        api_base: str | None = None,
        api_key: str | None = None,
        mode: Mode = "block",
        block_template: BlockTemplate = BLANK_LINE,
        context_window: int | None = None,
        max_new_tokens: int = 256,
        generate_kwargs: dict[str, Any] | None = None,
        model_kwargs: dict[str, Any] | None = None,
        device_map: str = "auto",
        **llm_fields: Any,
    ) -> None:
        check_known(type(self), llm_fields, [*type(self).model_fields, "engine", "api_key"])
        loading = (engine, model_name, tokenizer_name, kv_store, device_map, model_kwargs)
        source = EngineSource(*loading, api_base, api_key, recipe)
        own = ("is_chat_model", "is_function_calling_model")
        fields = {
            **source.fields(),
            "mode": mode,
            "block_template": block_template,
            "context_window": context_window,
            "max_new_tokens": max_new_tokens,
            "generate_kwargs": generate_kwargs or {},
            **{name: llm_fields.pop(name, None) for name in own},
        }
        super().__init__(**fields, **llm_fields)
        self._source = source

    @classmethod
    def class_name(cls) -> str:
        return "BlockAttentionLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex packs prompts by. Reads tokenizer and config at most, no weights."""
        return LLMMetadata(
            context_window=self.context_window or self._source.max_context_tokens,
            num_output=self.max_new_tokens,
            is_chat_model=self._takes_chat,
            is_function_calling_model=self._takes_tools,
            model_name=self.model_name or "unknown",
        )

    def to_payload(self) -> dict[str, Any]:
        """Fields of this LLM for events. Reads no files, because event loops call it."""
        names = ("model_name", "mode", "recipe", "context_window", "max_new_tokens")
        return {"class_name": self.class_name(), **{name: getattr(self, name) for name in names}}

    def engine_options(self, call: dict[str, Any]) -> dict[str, Any]:
        """Options of the engine for one call, which override the fields."""
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
        """A call with a prompt and its options."""
        shaping = {name: call[name] for name in PROMPT_OPTIONS if name in call}
        options = self.engine_options(call)
        if tools is not None:
            options = tools.engine_options(self._source.tokenizer.tokenizer, options)
        make_prompt = partial(self.to_prompt, prompt, formatted, tools=tools, **shaping)
        return Exchange(self._source, make_prompt, options)

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
        steps = self._exchange(prompt, kwargs, formatted).stream()
        return responses_of(steps, Responses().completion)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        return Responses().completion(await self._exchange(prompt, kwargs, formatted).aanswer())

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        steps = self._exchange(prompt, kwargs, formatted).astream()
        return aresponses_of(steps, Responses().completion)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return Responses().chat(self._chat_exchange(messages, kwargs).answer())

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return responses_of(self._chat_exchange(messages, kwargs).stream(), Responses().chat)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return Responses().chat(await self._chat_exchange(messages, kwargs).aanswer())

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        return aresponses_of(self._chat_exchange(messages, kwargs).astream(), Responses().chat)

    # -- tools -------------------------------------------------------------------------------

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
        """Arguments of ``chat`` for a call with tools."""
        messages = [*(chat_history or ())]
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
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
        """The tool calls of a response.

        Raises:
            ToolCallError: there is none or an invalid one, and ``error_on_no_tool_call`` is True.
        """
        return tool_selections(response, required=error_on_no_tool_call)
