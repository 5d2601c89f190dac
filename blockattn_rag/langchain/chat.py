"""ChatBlockAttention: a chat model for LangChain that reuses the KV of passages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import get_config_list, get_executor_for_config
from langchain_core.runnables.utils import gather_with_concurrency
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.exchange import (
    Exchange,
    Step,
    template_messages,
    template_variables,
    tools_of,
)
from blockattn_rag.engine.pending import MAX_BATCH, Group
from blockattn_rag.langchain.fields import GenerationFields, profile_of
from blockattn_rag.langchain.messages import (
    PROVIDER,
    chat_chunk,
    chat_result,
    chat_turns,
    without_markers,
)
from blockattn_rag.langchain.structured_output import Method, structured_chat
from blockattn_rag.output import tool_template
from blockattn_rag.output.tool_use import ToolUse, prompt_spans
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.chat_template import has_chat_template
from blockattn_rag.prompts.markers import strip_markers

Configs = RunnableConfig | list[RunnableConfig] | None


class ChatBlockAttention(GenerationFields, BaseChatModel):
    """Chat model that answers from cached passages with a transformers model.

    Passages are text between block markers (``BlockDocumentPrompt``, ``format_blocks``), text parts
    with a ``kv_handle``, or the documents of a retrieval tool's result. They are looked up in the
    KV store by the digest of their text, and encoded on a cache miss. The rest of the prompt is
    ordinary text. The constructor loads the model; unpickled copies load it on first use.

    For the arguments, see ``SourceFields`` (model, store) and ``GenerationFields`` (answers). Calls
    accept ``stop``, ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``seed``, ``mode``,
    ``recipe`` (for comparisons), ``response_format``, ``structured_outputs``,
    ``chat_template_kwargs`` and the arguments of transformers' ``generate``. Other arguments raise
    an error. The values of ``chat_template_kwargs`` are trusted text in the prompt, so never take
    them from users. For tools, see ``bind_tools``; for template variables and reasoning, see
    ``docs/guides/settings.md``.

    ``usage_metadata["input_token_details"]`` counts the prompt tokens that were reused
    (``cache_read``) and, in block mode, computed (``cache_creation``).
    ``response_metadata["block_attention"]`` contains counts of blocks and tokens, and timings.

    Raises:
        ContextOverflowError: Raised by calls if the prompt does not fit in the context window.

    Example::

        chat = ChatBlockAttention(model="bundled", kv_store="kv", max_tokens=64)
        chat.invoke([("system", format_blocks(documents)), ("human", "Where is Lake Bon?")])
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.recognize:
            self.source.check_recognizes()
        self.source.load()
        if self.profile is None:
            self.profile = profile_of(self.source)

    @classmethod
    def from_model_id(
        cls,
        model_id: str,
        task: str = "text-generation",
        *,
        device: int | str | None = None,
        device_map: str | None = None,
        model_kwargs: dict[str, Any] | None = None,
        pipeline_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> ChatBlockAttention:
        """Create a model with the main arguments of langchain-huggingface's ``from_model_id``."""
        if task != "text-generation":
            raise ValueError(f"Unsupported task {task!r}: expected 'text-generation'")
        if isinstance(device, int):
            device = "cpu" if device < 0 else f"cuda:{device}"
        options = dict(pipeline_kwargs or {})
        if options.pop("return_full_text", False):
            raise ValueError("Unsupported return_full_text=True: answers never include the prompt")
        if device or device_map:
            model_kwargs = {"device": device or device_map, **(model_kwargs or {})}
        named = [name for name in ("max_new_tokens", "temperature", "stop") if name in options]
        fields: dict[str, Any] = {name: options.pop(name) for name in named}
        fields |= {"model": model_id, "model_kwargs": model_kwargs, "generate_kwargs": options}
        return cls(**{**fields, **kwargs})

    @property
    def _llm_type(self) -> str:
        return "blockattn-rag-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools that the model may call; see ``docs/guides/agents.md``.

        Args:
            tools: Functions, pydantic classes, OpenAI tool definitions, or LangChain tools.
            tool_choice: ``"auto"`` (default): the model may call tools. ``"any"``, ``"required"``
                or True: it must call a tool. A tool's name: it must call this tool. ``"none"`` or
                False: it must not call tools. A grammar enforces required calls, with any chat
                template (extra ``structured``).
            parallel_tool_calls: If False, an answer has at most one call.
            strict: Value of ``strict`` in the tool definitions. Default: not set.
            kwargs: Additional call options. With ``tool_calls="constrained"``, a grammar constrains
                the answer to either text or valid calls.

        Raises:
            ValueError: The chat template does not support tools, or an option is invalid.
        """
        definitions = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choices = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        chosen = {name: value for name, value in choices.items() if value is not None}
        options = {"tools": definitions, **chosen, **kwargs}
        tools_of(self, options)  # Raises an error if an option is invalid.
        return self.bind(**options)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose answers match a schema, which a grammar enforces.

        Describe the fields in the prompt, unless ``method`` is ``"function_calling"``, which adds
        the schema to the prompt. Streams yield partial objects, or complete tool arguments.

        Args:
            schema: A pydantic class, whose instances are returned, or a TypedDict, JSON schema or
                OpenAI tool, for which dicts are returned.
            method: ``"json_schema"``: the answer is the object. ``"json_mode"``: the same, but the
                schema is optional. ``"function_calling"``: the model must call a tool whose
                arguments are the object; without tool support, same as ``"json_schema"``.
            include_raw: Whether to return a dict with ``raw``, ``parsed`` and ``parsing_error``.
            strict: Copied into the schema's definition. Answers match the schema in any case.

        Raises:
            ValueError: ``method`` is unknown, or ``schema`` is missing or invalid.
            TypeError: An argument is unknown.
            GrammarError: Raised by calls if the schema cannot be compiled.
            IncompleteAnswerError: Raised by calls if the answer was cut off. With ``include_raw``,
                it is returned as ``parsing_error``.
        """
        check_known(type(self), kwargs, ["schema", "method", "include_raw", "strict"])
        return structured_chat(
            self,
            schema,
            method,
            supports_tools=tool_template(self.source.tokenizer.tokenizer) is not None,
            include_raw=include_raw,
            strict=strict,
        )

    def to_prompt(
        self,
        messages: Sequence[BaseMessage],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> BlockPrompt:
        """Convert messages to blocks with the model's chat template.

        Args:
            tools, chat_template_kwargs: Tool definitions and template variables, as in a call.

        Raises:
            ValueError: The chat template is missing, or does not support the variables or tools, or
                a message has content other than text.
        """
        definitions = [convert_to_openai_tool(tool) for tool in tools or ()]
        tools_in_use = tools_of(self, {"tools": definitions})
        return self._prompt_with(tools_in_use, messages, chat_template_kwargs)

    def _prompt_with(
        self,
        tools: ToolUse | None,
        messages: Sequence[BaseMessage],
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> BlockPrompt:
        tokenizer = self.source.tokenizer.tokenizer
        if not has_chat_template(tokenizer):
            raise ValueError(
                f"The tokenizer of {self.model_name or 'this model'} has no chat template: set its "
                "chat_template. For a base model, a template that joins the contents is enough"
            )
        variables = template_variables(self, chat_template_kwargs)
        turns = template_messages(chat_turns(messages))
        spans = prompt_spans(tokenizer, turns, tools, **variables)
        return self.source.prompt_of(spans, self.block_template, recognize=self.recognize)

    def get_token_ids(self, text: str) -> list[int]:
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.source.tokenizer.text_ids(strip_markers(text))

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        return len(self.source.tokenizer.prompt_ids(self.to_prompt(messages, tools=tools)).flat)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return chat_result(self._exchange(messages, stop, kwargs).answer(), self.model_name)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        step = await self._exchange(messages, stop, kwargs).aanswer()
        return chat_result(step, self.model_name)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with closing(self._exchange(messages, stop, kwargs).stream(self._chunk)) as chunks:
            for chunk in chunks:
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(self._exchange(messages, stop, kwargs).astream(self._chunk)) as chunks:
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _exchange(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, call: dict[str, Any]
    ) -> Exchange:
        tools = tools_of(self, call)
        variables = call.get("chat_template_kwargs")
        make_prompt = partial(self._prompt_with, tools, messages, variables)
        return Exchange(self.source, make_prompt, self.engine_options(stop, call), tools)

    def _chunk(self, step: Step) -> ChatGenerationChunk:
        return chat_chunk(step, self.model_name, is_v1=self.output_version == "v1")

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer several inputs, in shared forward passes if batching leaves answers unchanged.

        ``max_concurrency`` in the config limits the batch size (default: 16). With a ``seed``,
        inputs are answered one by one, so that each answer equals that of a single call.
        """
        at_once = _at_once(inputs, config)
        batch = super().batch
        if (group := self._group(len(inputs), at_once, kwargs)) is None:
            return batch(inputs, config, return_exceptions=return_exceptions, **kwargs)

        def answer(value: LanguageModelInput, its: RunnableConfig) -> AIMessage:
            with group.call():
                return batch([value], its, return_exceptions=return_exceptions, **kwargs)[0]

        configs = get_config_list(config, len(inputs))
        with get_executor_for_config({"max_concurrency": at_once}) as executor:
            try:
                return list(executor.map(answer, inputs, configs))
            except BaseException:
                group.dissolve()  # The batch's remaining calls will not start.
                raise

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Async version of ``batch``. Canceling it stops the generation."""
        at_once = _at_once(inputs, config)
        abatch = super().abatch
        if (group := self._group(len(inputs), at_once, kwargs)) is None:
            return await abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

        async def answer(value: LanguageModelInput, its: RunnableConfig) -> AIMessage:
            with group.call():
                only = await abatch([value], its, return_exceptions=return_exceptions, **kwargs)
                return only[0]

        configs = get_config_list(config, len(inputs))
        answers = (answer(value, its) for value, its in zip(inputs, configs, strict=True))
        return await gather_with_concurrency(at_once, *answers)

    def _group(self, calls: int, at_once: int, call: dict[str, Any]) -> Group | None:
        exchange = self._exchange([], call.get("stop"), call)
        if at_once < 2 or exchange.options.get("seed") is not None:
            return None
        return Group(exchange.group_key, calls, at_once)

    def with_fallbacks(self, fallbacks: Sequence[Runnable[Any, Any]], **kwargs: Any) -> Any:
        """Like ``Runnable.with_fallbacks``, but removes block markers from the inputs of fallbacks.

        Fallbacks that are a ``ChatBlockAttention`` receive the markers. Call this method on the
        model itself: ``bind``, ``with_config`` and ``with_retry`` return LangChain runnables, whose
        ``with_fallbacks`` keeps the markers for all fallbacks.
        """
        cleaned = [
            other if _is_own(other) else RunnableLambda(without_markers) | other
            for other in fallbacks
        ]
        return super().with_fallbacks(cleaned, **kwargs)


def _is_own(runnable: Any) -> bool:
    while isinstance(runnable, RunnableBindingBase):
        runnable = runnable.bound
    return isinstance(runnable, ChatBlockAttention)


def _at_once(inputs: list[LanguageModelInput], config: Configs) -> int:
    first = config[0] if isinstance(config, list) and config else config
    limit = first.get("max_concurrency") if isinstance(first, dict) else None
    return min(len(inputs), limit or MAX_BATCH)
