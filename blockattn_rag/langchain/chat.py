"""ChatBlockAttention: a local chat model for LangChain that reuses the KV of passages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list, get_executor_for_config
from langchain_core.runnables.utils import gather_with_concurrency
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.engine.pending import MAX_BATCH, Group
from blockattn_rag.langchain.exchange import ChatExchange
from blockattn_rag.langchain.fields import GenerationFields
from blockattn_rag.langchain.messages import as_template_messages
from blockattn_rag.langchain.profile import SourceProfile
from blockattn_rag.langchain.structured_output import Method, structured_chat
from blockattn_rag.output import tool_template
from blockattn_rag.output.thinking import has_no_thoughts
from blockattn_rag.output.tool_use import (
    TOOL_OPTIONS,
    ToolUse,
    prompt_spans,
    with_default_calls,
)
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.chat_template import check_template_kwargs, has_chat_template
from blockattn_rag.prompts.markers import strip_markers

Configs = RunnableConfig | list[RunnableConfig] | None


class ChatBlockAttention(GenerationFields, BaseChatModel):  # type: ignore[misc]
    """A local transformers chat model that answers from cached passages.

    Passages that arrive between block markers (``BlockDocumentPrompt``, ``format_blocks``), or as
    text parts with a ``kv_handle``, are looked up in the KV store by the digest of their text, and
    computed if they are not there; everything else in the prompt is ordinary text. Nothing is
    loaded before it is needed.

    For the arguments see ``EngineFields`` (model, store) and ``GenerationFields`` (answers). A call
    takes ``stop``, ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``seed``, ``mode``,
    ``recipe`` (for comparisons), ``chat_template_kwargs`` and whatever transformers' ``generate``
    takes; anything else raises. For tools see ``bind_tools``.

    ``chat_template_kwargs``, of a call or of ``generate_kwargs``, are variables of the model's chat
    template, such as ``enable_thinking``. Their values become text of the template: never take
    them from users.

    What a model thinks before it answers, if its chat template marks thoughts by ``<think>``, is
    ``additional_kwargs["reasoning_content"]``, and a block of the type ``reasoning`` among
    ``content_blocks``. ``profile`` is read from the model's files when it is first asked.

    ``usage_metadata["input_token_details"]`` tells the prompt tokens that came from the store
    (``cache_read``) and that were computed (``cache_creation``);
    ``response_metadata["block_attention"]`` has blocks, tokens and seconds.

    Raises:
        ContextOverflowError: (from a call) the prompt does not fit the model.

    Example::

        chat = ChatBlockAttention(model="bundled", kv_store="kv", max_tokens=64)
        chat.invoke([("system", format_blocks(documents)), ("human", "Where is Lake Bon?")])
    """

    prompt_options: ClassVar[tuple[str, ...]] = ("chat_template_kwargs", *TOOL_OPTIONS)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)

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
        """As langchain-huggingface's ``from_model_id``; ``kwargs`` are constructor arguments."""
        if task != "text-generation":
            raise ValueError(f"task must be 'text-generation', found {task!r}")
        if isinstance(device, int):
            device = "cpu" if device < 0 else f"cuda:{device}"
        options = dict(pipeline_kwargs or {})
        if options.pop("return_full_text", False):
            raise ValueError("return_full_text=True is not supported: answers come without prompt")
        named = ("max_new_tokens", "temperature", "stop")
        own = {} if device is None and device_map is None else {"device": device or device_map}
        arguments = {
            "model_name": model_id,
            "model_kwargs": {**own, **(model_kwargs or {})},
            **{name: options.pop(name) for name in named if name in options},
            "generate_kwargs": options,
        }
        return cls(**{**arguments, **kwargs})

    @property
    def _llm_type(self) -> str:
        return "blockattn-rag-chat"

    def _resolve_model_profile(self) -> ModelProfile:
        return cast(ModelProfile, SourceProfile(self.source))

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools, which it may call; see ``docs/guides/agents.md``.

        Args:
            tools: functions, pydantic classes, definitions as OpenAI has them, or tools.
            tool_choice: ``"auto"``, the default: the model may call any or none; ``"any"``,
                ``"required"`` or True: it must call one; a tool's name: it must call that one;
                ``"none"``: it must call none. Where it must call one, a grammar holds it to
                arguments that fit the schema, which needs the extra ``structured``.
            parallel_tool_calls: False: one call at most.
            strict: goes into the definitions of the tools.
            kwargs: further options of the calls. With ``tool_calls="constrained"`` a grammar
                decides between text and calls from the first token on, which needs ``structured``.

        Raises:
            ValueError: the model's chat template supports no tools and no call is required, or
                ``tool_choice`` or ``tool_calls`` is none of the above.
        """
        definitions = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choice = tool_choice
        if isinstance(choice, str) and choice not in {"auto", "none", "any", "required"}:
            choice = {"type": "function", "function": {"name": choice}}
        bound = {"tool_choice": choice, "parallel_tool_calls": parallel_tool_calls}
        bound = {name: value for name, value in bound.items() if value is not None}
        self._tools({**kwargs, "tools": definitions, **bound})  # refused now
        return self.bind(tools=definitions, **bound, **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model whose answers are objects of a schema; every token is held to it.

        The schema is not shown to the model, a tool's excepted: say in the prompt what the fields
        mean. An answer that is cut raises. A stream gives what the object is so far; a tool's
        arguments come whole.

        Args:
            schema: a pydantic class, whose objects come, or a TypedDict, JSON schema or OpenAI
                tool, for which dicts come.
            method: with each of them the answer is held to the schema; ``"json_mode"`` does without
                one, and then any JSON object may come. ``"function_calling"`` makes the object the
                arguments of a tool that must be called, and shows the schema to the model as this
                tool's, where its chat template knows tools; elsewhere it is ``"json_schema"``.
            include_raw: give ``{"raw": message, "parsed": object, "parsing_error": error}``.
            strict: sent to a server, as OpenAI has it; answers follow the schema in any case.
            kwargs: there are no others.

        Raises:
            IncompleteAnswerError: (from a call) the answer was cut.
            GrammarError: (from a call) the schema cannot be compiled.
            TypeError: there are other arguments.
        """
        check_known(type(self), kwargs, ["schema", "method", "include_raw", "strict"])
        knows_tools = tool_template(self.source.tokenizer.tokenizer) is not None
        return structured_chat(
            self, schema, method, knows_tools=knows_tools, include_raw=include_raw, strict=strict
        )

    def to_prompt(
        self,
        messages: Sequence[BaseMessage],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> BlockPrompt:
        """The blocks that messages become, in the model's own chat template.

        Args:
            messages: of a conversation.
            tools: as for ``bind_tools``.
            chat_template_kwargs: variables of the template, beside those of ``generate_kwargs``.

        Raises:
            ValueError: the tokenizer has no chat template, the template does not read one of
                ``chat_template_kwargs`` or supports no tools, or a message is more than text.
        """
        definitions = [convert_to_openai_tool(tool) for tool in tools or ()]
        use = self._tools({"tools": definitions})
        return self._prompt_with(use, messages, chat_template_kwargs)

    def _tools(self, call: Mapping[str, Any]) -> ToolUse | None:
        """The tools of a call with these options; None if it has none."""
        call = with_default_calls(self.generate_kwargs, call)
        return ToolUse.of_call(call, lambda: self.source.tokenizer.tokenizer, self.model_name)

    def _prompt_with(
        self,
        tools: ToolUse | None,
        messages: Sequence[BaseMessage],
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> BlockPrompt:
        tokenizer = self.source.tokenizer.tokenizer
        if not has_chat_template(tokenizer):
            raise ValueError(
                f"the tokenizer of {self.model_name} has no chat template; set its chat_template, "
                "or use BlockAttentionLLM for prompts that are strings"
            )
        own = self.generate_kwargs.get("chat_template_kwargs") or {}
        given = {**own, **(chat_template_kwargs or {})}
        variables = check_template_kwargs(tokenizer, given)
        turns = as_template_messages(messages)
        spans = prompt_spans(tokenizer, turns, tools, **variables)
        return BlockPrompt.from_spans(spans, self.block_template)

    def engine_options(self, stop: list[str] | None, call: dict[str, Any]) -> dict[str, Any]:
        options, tools = super().engine_options(stop, call), self._tools(call)
        if tools is None:
            return options
        return tools.engine_options(self.source.tokenizer.tokenizer, options)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text without its markers and without BOS."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.source.tokenizer.text_ids(strip_markers(text))

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that these messages become."""
        return len(self.source.tokenizer.prompt_ids(self.to_prompt(messages, tools=tools)).flat)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        exchange, options = self._exchange(messages, kwargs), self.engine_options(stop, kwargs)
        group = Group.of_this_call((self.source, options))
        pending = self.engine.submit(exchange.prompt(), group=group, **options)
        return exchange.result(pending.result())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        exchange, options = self._exchange(messages, kwargs), self.engine_options(stop, kwargs)
        group = Group.of_this_call((self.source, options))
        return exchange.result(await self.source.agenerate(exchange.prompt, options, group))

    def _exchange(self, given: Any, call: dict[str, Any]) -> ChatExchange:
        tools, variables = self._tools(call), call.get("chat_template_kwargs")
        make_prompt = partial(self._prompt_with, tools, given, variables)
        at_once = has_no_thoughts(self.engine_options(None, call))
        reader = tools.reader(super().engine_options(None, call)) if tools else None
        return ChatExchange(self, make_prompt, reader, answers_at_once=at_once)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer several inputs; those under way at a time share each forward of the model.

        Every input keeps its own config, callbacks, cache look-up and error, as with any chat
        model. ``max_concurrency`` bounds how many are taken together (16 by default). Sampling
        with a ``seed`` goes one by one, so that it gives what single calls give.
        """
        at_once = _at_once(inputs, config)
        batch = super().batch
        if (group := self._group(len(inputs), at_once, kwargs)) is None:
            return batch(inputs, config, return_exceptions=return_exceptions, **kwargs)

        def answer(one: LanguageModelInput, its: RunnableConfig) -> AIMessage:
            with group.call():
                return batch([one], its, return_exceptions=return_exceptions, **kwargs)[0]

        configs = get_config_list(config, len(inputs))
        with get_executor_for_config({"max_concurrency": at_once}) as executor:
            try:
                return list(executor.map(answer, inputs, configs))
            except BaseException:
                group.dissolve()  # because the executor waits for the calls under way alone
                raise

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """``batch`` for event loops. A batch ends early when all of its calls are cancelled."""
        at_once = _at_once(inputs, config)
        abatch = super().abatch
        if (group := self._group(len(inputs), at_once, kwargs)) is None:
            return await abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

        async def answer(one: LanguageModelInput, its: RunnableConfig) -> AIMessage:
            with group.call():
                only = await abatch([one], its, return_exceptions=return_exceptions, **kwargs)
                return only[0]

        configs = get_config_list(config, len(inputs))
        answers = (answer(one, its) for one, its in zip(inputs, configs, strict=True))
        return await gather_with_concurrency(at_once, *answers)

    def _group(self, calls: int, at_once: int, call: dict[str, Any]) -> Group | None:
        """The group of some calls; None if the model is to answer them one by one."""
        own = {name: value for name, value in call.items() if name != "stop"}
        options = self.engine_options(call.get("stop"), own)
        if at_once < 2 or options.get("seed") is not None:
            return None
        return Group((self.source, options), calls, at_once)


def _at_once(inputs: list[LanguageModelInput], config: Configs) -> int:
    first = config[0] if isinstance(config, list) and config else config
    wanted = first.get("max_concurrency") if isinstance(first, dict) else None
    return min(len(inputs), wanted or MAX_BATCH)
