"""BlockAttentionLLM: a model for LlamaIndex that reuses the keys and values of passages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing, closing
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
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike
from blockattn_rag.engine.protocol import Engine
from blockattn_rag.engine.results import Mode
from blockattn_rag.llama_index.chat import ChatReader, tool_selections
from blockattn_rag.llama_index.exchange import Exchange
from blockattn_rag.llama_index.prompting import PROMPT_OPTIONS, PromptLike, PromptMaking
from blockattn_rag.llama_index.structured_output import StructuredPrediction
from blockattn_rag.output.tool_use import ToolUse, with_default_calls, without_tool_options
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.store import KVStore


class BlockAttentionLLM(PromptMaking, StructuredPrediction, CustomLLM, FunctionCallingLLM):
    """A transformers model, in this process or behind a server, that answers from cached passages.

    Takes the place of ``HuggingFaceLLM`` and shares its argument names. Passages that arrive
    between block markers (see ``BlockKVPostprocessor``) are looked up in the KV store by the
    digest of their text, and computed if they are not there; everything else in the prompt is
    ordinary text. Nothing is loaded before it is needed.

    Args:
        model_name: Path, hub id, or ``"bundled"``.
        tokenizer_name: Where to load the tokenizer. Default: the model's.
        engine: A ready engine, shared with others, in place of everything that describes how to
            load one.
        kv_store: KV store: a directory, an address such as ``"s3://bucket/kv"`` (see
            ``store.open_store``), or a store object. Default: 1 GiB of memory.
        recipe: How a model that is not block-fine-tuned runs in block mode: ``"auto"``, ``"none"``,
            or the folder of a recipe, which ``blockattn-rag repair`` writes. ``"auto"`` takes the
            best one that is known, such as the one beside the store.
        api_base: Address of a server with the model and the store (docs/guides/serving_vllm.md),
            such as ``"http://gpu:8000/v1"``; ``model_name`` is then its name there.
        api_key: API key of the server. Default: ``BLOCKATTN_RAG_API_KEY`` of the environment.
        mode: ``"block"`` reuses passages; ``"full"`` is ordinary attention over the same tokens.
        block_template: Text around each passage; must be that of ``BlockKVTransform``.
        context_window: Tokens that the frameworks may fill. Default: all that the model holds.
        max_new_tokens: Longest answer.
        generate_kwargs: Defaults of every call, such as ``temperature`` or ``stop``.
        model_kwargs: Arguments for loading the model, such as ``dtype``, or those of
            ``RemoteEngine``, such as ``timeout_s``.
        device_map: A torch device, or ``"auto"``.
        llm_fields: LlamaIndex's own fields: ``system_prompt``, ``callback_manager``,
            ``messages_to_prompt`` (default: the tokenizer's chat template),
            ``completion_to_prompt`` (for unformatted completions; default for chat models: one
            user message), and what ``metadata`` reports: ``is_chat_model`` (default: whether there
            is a chat template) and ``is_function_calling_model`` (default: whether that takes
            tools). True for a template that takes none: calls that are required, as Pydantic
            selectors require them, are made by a grammar, and others refused. With both given, and
            ``context_window``, ``metadata`` reads no file.

    Calls, and ``generate_kwargs`` for all calls, take ``max_new_tokens``, ``temperature``,
    ``top_p``, ``top_k``, ``stop``, ``seed``, ``mode``, ``recipe`` (for comparisons), whatever
    transformers' ``generate`` takes, and two options of the prompt; anything else raises.
    ``chat_template_kwargs`` are variables of the chat template, such as ``enable_thinking``. Their
    values become text of the template: never take them from users. ``parse_special_tokens=True``
    parses control tokens in prompts that are strings, passages excepted, for prompt templates of
    your own that write them. Questions in such strings can then write them too. Chat messages need
    none of this: there the template alone can.

    ``raw["usage"]`` has the tokens and what was reused. What a model thinks before it answers, if
    its chat template marks thoughts by ``<think>``, is a ``ThinkingBlock`` of the message, and
    ``additional_kwargs["thinking"]`` of a completion; ``"thinking_delta"`` is what a step of a
    stream adds. Where the chat template knows tools, this is a function calling LLM:
    ``tool_choice`` and ``tool_required=True`` hold it to valid calls by a grammar, which needs the
    extra ``structured``; with ``tool_calls="constrained"``, of a call or in ``generate_kwargs``, a
    grammar decides between text and calls (docs/guides/agents.md).

    Raises:
        ContextOverflowError: (from a call) the prompt does not fit the model; LlamaIndex packs
            passages by ``context_window`` (see ``configure``), so retrieve fewer otherwise.
    """

    mode: Mode = Field(description="'block' reuses passages, 'full' is ordinary attention.")
    context_window: int | None = Field(description="Tokens to fill; None for the model's limit.")
    max_new_tokens: int = Field(description="Longest answer, in tokens.", gt=0)

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
        """What frameworks pack prompts by. Reads the tokenizer and config at most, no weights."""
        return LLMMetadata(
            context_window=self.context_window or self._source.max_context_tokens,
            num_output=self.max_new_tokens,
            is_chat_model=self._takes_chat,
            is_function_calling_model=self._takes_tools,
            model_name=self.model_name or "unknown",
        )

    def to_payload(self) -> dict[str, Any]:
        """What events say of this LLM: fields alone, so that it costs nothing in an event loop."""
        names = ("model_name", "mode", "recipe", "context_window", "max_new_tokens")
        return {"class_name": self.class_name(), **{name: getattr(self, name) for name in names}}

    def _tools(self, call: Mapping[str, Any]) -> ToolUse | None:
        """The tools of a call with these options; None if it has none."""
        call = with_default_calls(self.generate_kwargs, call)
        return ToolUse.of_call(call, lambda: self._source.tokenizer.tokenizer, self.model_name)

    def engine_options(self, call: dict[str, Any]) -> dict[str, Any]:
        """Options of one call for the engine: what the call says, else the fields."""
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
        """A call with a prompt and options."""
        shaping = {name: call[name] for name in PROMPT_OPTIONS if name in call}
        options = self.engine_options(call)
        if tools is not None:
            options = tools.engine_options(self._source.tokenizer.tokenizer, options)
        make_prompt = partial(self.to_prompt, prompt, formatted, tools=tools, **shaping)
        return Exchange(self._source, make_prompt, options)

    def _chat_exchange(
        self, messages: Sequence[ChatMessage], call: dict[str, Any]
    ) -> tuple[Exchange, ChatReader]:
        """A call with messages, and what reads its answer."""
        tools, own = self._tools(call), without_tool_options(call)
        reader = tools.reader(self.engine_options(own)) if tools else None
        return self._exchange(messages, own, tools=tools), ChatReader(reader)

    def _answer(self, exchange: Exchange) -> CompletionResponse:
        return exchange.whole(self.engine.generate(exchange.prompt(), **exchange.options))

    def _stream(self, exchange: Exchange) -> CompletionResponseGen:
        prompt = exchange.prompt()
        with closing(self.engine.stream(prompt, **exchange.options)) as chunks:
            for chunk in chunks:
                yield exchange.step(chunk)

    async def _aanswer(self, exchange: Exchange) -> CompletionResponse:
        return exchange.whole(await self._source.agenerate(exchange.prompt, exchange.options))

    async def _astream(self, exchange: Exchange) -> CompletionResponseAsyncGen:
        async with aclosing(self._source.astream(exchange.prompt, exchange.options)) as chunks:
            async for chunk in chunks:
                yield exchange.step(chunk)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._answer(self._exchange(prompt, kwargs, formatted))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        return self._stream(self._exchange(prompt, kwargs, formatted))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        return await self._aanswer(self._exchange(prompt, kwargs, formatted))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        return self._astream(self._exchange(prompt, kwargs, formatted))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        exchange, reader = self._chat_exchange(messages, kwargs)
        answer = self._answer(exchange)
        return reader.response(answer, exchange.marks)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        exchange, reader = self._chat_exchange(messages, kwargs)
        with closing(self._stream(exchange)) as steps:
            for step in steps:
                yield reader.response(step, exchange.marks, last=step.raw is not None)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        exchange, reader = self._chat_exchange(messages, kwargs)
        answer = await self._aanswer(exchange)
        return reader.response(answer, exchange.marks)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        async def responses() -> ChatResponseAsyncGen:
            exchange, reader = self._chat_exchange(messages, kwargs)
            async with aclosing(self._astream(exchange)) as steps:
                async for step in steps:
                    yield reader.response(step, exchange.marks, last=step.raw is not None)

        return responses()

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
        """The arguments of ``chat`` for a call with tools."""
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
        """The calls of a response.

        Raises:
            ToolCallError: there is none, or a malformed one, and ``error_on_no_tool_call``.
        """
        return tool_selections(response, required=error_on_no_tool_call)
