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
from blockattn_rag.adapters.passage_encoding import PassageEncoding, passage_encoding
from blockattn_rag.engine.options import OnMiss, checked_option
from blockattn_rag.engine.protocol import Engine
from blockattn_rag.engine.results import Mode
from blockattn_rag.kv.context import Positions
from blockattn_rag.llama_index.chat import ChatReader, tool_selections
from blockattn_rag.llama_index.exchange import Exchange
from blockattn_rag.llama_index.prompting import PromptLike, PromptMaking
from blockattn_rag.llama_index.structured_output import StructuredPrediction
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.store import KVStore
from blockattn_rag.tools.use import (
    ToolUse,
    with_default_calls,
    without_default_calls,
    without_tool_options,
)

_OPTION_FIELDS = (
    *("mode", "on_miss", "positions"),
    *("sink", "correction", "merge", "promote", "reader", "retry"),
)


class BlockAttentionLLM(PromptMaking, StructuredPrediction, CustomLLM, FunctionCallingLLM):
    """A transformers model, in this process or behind a server, that answers from cached passages.

    Takes the place of ``HuggingFaceLLM`` and shares its argument names. Passages that arrive
    between block markers (see ``BlockKVPostprocessor``) are looked up in the KV store by the
    digest of their text, and computed if they are not there; everything else in the prompt is
    ordinary text. Nothing is loaded before it is needed.

    Args:
        model_name: path, hub id, or ``"bundled"``.
        model: a loaded transformers model, with its ``tokenizer``; instead of ``model_name``.
        tokenizer, tokenizer_name: a transformers tokenizer, or where to load it; default: the
            model's.
        engine: a ready engine, shared with others; instead of all that says how to load one.
        kv_store: the KV store: a directory, an address such as ``"s3://bucket/kv"`` (see
            ``store.open_store``), or a store object; default: 1 GiB of memory.
        api_base: address of a server with the model and the store (docs/guides/serving_vllm.md),
            such as ``"http://gpu:8000/v1"``; ``model_name`` is then its name there, and options
            that change how the model computes cannot be given.
        api_key: of the server; default: ``BLOCKATTN_RAG_API_KEY`` of the environment.
        mode: ``"block"`` reuses passages; ``"full"`` is ordinary attention over the same tokens.
        on_miss: ``"compute"`` what is not stored, or ``"error"``.
        positions: ``"reordered"``, or ``"composite"``, the papers' ablation.
        block_template: what stands around each passage; must be that of ``BlockKVTransform``.
        sink: what passages are encoded after, such as ``"head:4"`` for models that are not
            block-fine-tuned (see ``prompts.sinks``); must be that of ``BlockKVTransform``. Default:
            the engine's own.
        correction: file of a correction of the passages' keys and values (see
            ``model.correction``); must be that of ``BlockKVTransform``, and belongs to one sink.
            Default: the engine's own.
        merge, promote, reader, retry: further repairs for models that are not block-fine-tuned; see
            ``BlockOptions``. ``promote=1`` takes the first passage, which is the best one in the
            retriever's order. Where a postprocessor reorders passages (``LongContextReorder`` puts
            the best at both ends), take ``"attention:1"``; after ``BlockKVPostprocessor``'s
            ``"ascending"``, ``"last:1"``. Default: the engine's own.
        context_window: tokens that the frameworks may fill; default: all that the model holds.
        max_new_tokens: longest answer.
        generate_kwargs: defaults of every call, such as ``temperature`` or ``stop``.
        model_kwargs: for loading the model, such as ``dtype``; with a server, for ``RemoteEngine``,
            such as ``timeout_s``.
        device_map: a torch device, or ``"auto"``.
        is_chat_model: default: whether the tokenizer has a chat template.
        is_function_calling_model: default: whether that template takes tools. True for one that
            takes none: calls that are required, as Pydantic selectors require them, are made by a
            grammar, and others refused. With both given, and ``context_window``, ``metadata`` reads
            no file.
        parse_special_tokens: whether control tokens are parsed in prompts that are strings,
            passages excepted: for own prompt templates that write them. Questions in such strings
            can then write them too. Chat messages need none of this: there the template alone can.
        system_prompt: goes before every prompt of the frameworks, as with any LlamaIndex LLM.
        messages_to_prompt: default: the tokenizer's chat template.
        chat_template_kwargs: variables of that template, such as ``enable_thinking``; those of a
            call go before. Their values become text of the template: never take them from users.
        completion_to_prompt: applied to unformatted completions; default for chat models: one
            user message, else the text as it stands.

    Per call, ``complete`` and ``chat`` take ``max_new_tokens``, ``temperature``, ``top_p``,
    ``top_k``, ``stop``, ``seed``, ``mode``, ``positions``, ``sink``, ``correction``,
    ``merge``, ``promote``, ``reader``, ``retry``, ``on_miss``, ``chat_template_kwargs`` and
    whatever transformers' ``generate`` takes; anything else raises. ``raw["usage"]`` has the tokens
    and what was reused. What a model thinks before it answers, if its chat template marks thoughts
    by ``<think>``, is a ``ThinkingBlock`` of the message, and ``additional_kwargs["thinking"]`` of
    a completion; ``"thinking_delta"`` is what a step of a stream adds. Where the chat template
    knows tools, this is a function calling LLM: ``tool_choice`` and ``tool_required=True`` hold it
    to valid calls by a grammar, which needs the extra ``structured``; with
    ``tool_calls="constrained"``, of a call or in ``generate_kwargs``, a grammar decides between
    text and calls (docs/guides/agents.md).

    Raises:
        ContextOverflowError: (from a call) the prompt does not fit the model; LlamaIndex packs
            passages by ``context_window`` (see ``configure``), so retrieve fewer otherwise.
    """

    mode: Mode = Field(description="'block' reuses passages, 'full' is ordinary attention.")
    on_miss: OnMiss = Field(description="'compute' or 'error' when a block is not stored.")
    positions: Positions = Field(description="'reordered' or 'composite' positions of blocks.")
    sink: str | None = Field(description="What passages are encoded after.")
    correction: str | None = Field(description="File of a correction of keys and values.")
    merge: str | None = Field(description="How attention to passages is weighted.")
    promote: str | None = Field(description="Passages that move to the final block.")
    reader: str | None = Field(description="Folder of a reader adapter.")
    retry: str | None = Field(description="How to answer again after an abstention.")
    context_window: int | None = Field(description="Tokens to fill; None for the model's limit.")
    max_new_tokens: int = Field(description="Longest answer, in tokens.", gt=0)
    generate_kwargs: dict[str, Any] = Field(description="Defaults of every call.")

    def __init__(
        self,
        model_name: str | None = None,
        *,
        model: Any = None,
        tokenizer: Any = None,
        tokenizer_name: str | None = None,
        engine: Engine | None = None,
        kv_store: KVStore | str | Path | None = None,
        api_base: str | None = None,
        api_key: str | None = None,
        mode: Mode = "block",
        on_miss: OnMiss = "compute",
        positions: Positions = "reordered",
        block_template: BlockTemplate = BLANK_LINE,
        sink: str | None = None,
        correction: str | Path | None = None,
        merge: str | None = None,
        promote: str | int | None = None,
        reader: str | Path | None = None,
        retry: str | None = None,
        context_window: int | None = None,
        max_new_tokens: int = 256,
        generate_kwargs: dict[str, Any] | None = None,
        model_kwargs: dict[str, Any] | None = None,
        device_map: str = "auto",
        is_chat_model: bool | None = None,
        is_function_calling_model: bool | None = None,
        parse_special_tokens: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        **llm_fields: Any,
    ) -> None:
        known = [*type(self).model_fields, "model", "tokenizer", "engine", "api_key"]
        check_known(type(self), llm_fields, known)
        model = model if model is not None else model_name
        tokenizer = tokenizer if tokenizer is not None else tokenizer_name
        loading = (engine, model, tokenizer, kv_store, device_map, model_kwargs)
        source = EngineSource(*loading, api_base, api_key)
        fields = {
            **source.fields(),
            "mode": mode,
            "on_miss": on_miss,
            "positions": positions,
            "block_template": block_template,
            "sink": checked_option("sink", sink),
            "correction": checked_option("correction", correction),
            "merge": checked_option("merge", merge),
            "promote": checked_option("promote", promote),
            "reader": checked_option("reader", reader),
            "retry": checked_option("retry", retry),
            "context_window": context_window,
            "max_new_tokens": max_new_tokens,
            "generate_kwargs": generate_kwargs or {},
            "is_chat_model": is_chat_model,
            "is_function_calling_model": is_function_calling_model,
            "parse_special_tokens": parse_special_tokens,
            "chat_template_kwargs": chat_template_kwargs or {},
        }
        super().__init__(**fields, **llm_fields)
        self._source = source

    @classmethod
    def class_name(cls) -> str:
        return "BlockAttentionLLM"

    @property
    def passage_encoding(self) -> PassageEncoding:
        """How its answers expect passages to be encoded."""
        return passage_encoding(self.engine_options({}))

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
        names = ("model_name", "mode", "positions", "context_window", "max_new_tokens")
        return {"class_name": self.class_name(), **{name: getattr(self, name) for name in names}}

    def _tools(self, call: Mapping[str, Any]) -> ToolUse | None:
        """The tools of a call with these options; None if it has none."""
        call = with_default_calls(self.generate_kwargs, call)
        return ToolUse.of_call(call, lambda: self._source.tokenizer.tokenizer, self.model_name)

    def engine_options(self, call: dict[str, Any]) -> dict[str, Any]:
        """Options of one call for the engine: what the call says, else the fields."""
        own = {name: getattr(self, name) for name in (*_OPTION_FIELDS, "max_new_tokens")}
        return {**own, **without_default_calls(self.generate_kwargs), **call}

    def _exchange(
        self,
        prompt: PromptLike,
        call: dict[str, Any],
        formatted: bool = True,
        tools: ToolUse | None = None,
    ) -> Exchange:
        """A call with a prompt and options."""
        variables = call.pop("chat_template_kwargs", None)
        options = self.engine_options(call)
        if tools is not None:
            options = tools.engine_options(self._source.tokenizer.tokenizer, options)
        make_prompt = partial(
            self.to_prompt, prompt, formatted, tools=tools, chat_template_kwargs=variables
        )
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
