"""Pydantic fields of components with an engine, and of language models.

LangChain copies, configures and pickles components through their fields, so the engine source is
also a field.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, ClassVar, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import BaseModel, ConfigDict, Field, model_validator

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.engine_source import EngineSource
from blockattn_rag.adapters.exchange import Exchange, Step
from blockattn_rag.adapters.server_source import ServerSource
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.langchain.messages import PROVIDER, without_markers
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.recognition import Recognize

_SOURCE_FIELDS = ("model_name", "kv_store", "model_kwargs", "recipe")
_ALIASES = {"model": "model_name"}
_OF_CLIENTS = ("timeout", "max_retries")


class SourceFields(BaseModel):
    """Fields of a component with a model, in this process or on a server.

    Args:
        model_name (or model): Path, hub id, ``"bundled"``, or a loaded transformers model.
        engine: An existing engine. Replaces the arguments for loading one.
        kv_store: KV store: a directory, an address such as ``"s3://bucket/kv"`` (see
            ``store.open_store``), or a store object. Default: 1 GiB in memory.
        recipe: Recipe of block mode, for models that are not block-fine-tuned: ``"auto"``,
            ``"none"``, or a folder written by ``blockattn-rag repair``. ``"auto"`` uses the best
            known recipe, such as the one next to the store. Default: ``"auto"``.
        model_kwargs: Arguments for loading the model, such as ``dtype``, ``device`` or
            ``tokenizer`` (an object, name or path).
        block_template: Text around each passage. Ingestion and answers must use the same template.
            The LlamaIndex adapter has the same default, so both adapters can share stored passages.

    Raises:
        ValueError: No model was passed, or several were.
        TypeError: An argument is unknown.
    """

    model_config = ConfigDict(
        populate_by_name=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        hide_input_in_errors=True,  # The input may contain an API key.
    )

    apart: ClassVar[tuple[str, ...]] = ("engine",)
    """Constructor arguments that are not fields."""

    model_name: str | None = Field(default=None, alias="model")
    kv_store: str | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    block_template: BlockTemplate = BLANK_LINE
    recipe: str = "auto"
    source: EngineSource | ServerSource = Field(exclude=True, repr=False)
    """Source of the model. Copies of a component share it, and thereby the weights."""

    @model_validator(mode="before")
    @classmethod
    def _find_source(cls, values: dict[str, Any]) -> dict[str, Any]:
        aliases = {field.alias for field in cls.model_fields.values() if field.alias}
        check_known(cls, values, [*cls.model_fields, *aliases, *_ALIASES, *cls.apart])
        fields = {_ALIASES.get(name, name): value for name, value in values.items()}
        arguments = {name: fields.pop(name, None) for name in ("engine", *_SOURCE_FIELDS)}
        source = cls._source_of(fields, arguments)
        return {**fields, **source.fields(), "source": source}

    @classmethod
    @abstractmethod
    def _source_of(
        cls, fields: dict[str, Any], arguments: dict[str, Any]
    ) -> EngineSource | ServerSource:
        """Create the source of the model from a constructor's arguments."""


class GenerationFields(SourceFields):
    """Fields of an in-process language model: the default options of all calls.

    Options of a call override them. LangChain's standard arguments ``timeout`` and ``max_retries``
    are accepted, but have no effect in this process.

    Args:
        max_tokens (or max_new_tokens): Maximum number of tokens in an answer.
        temperature: Sampling temperature. None or 0: greedy decoding.
        stop (or stop_sequences): Strings that end the answer. They are not included in it.
        streaming: Whether ``invoke`` streams internally, so that callbacks receive tokens as they
            are generated.
        recognize: Whether to also recognize ingested passages in text without markers, so that
            prompts do not need ``format_blocks``. ``"system"``: also in system messages.
        generate_kwargs: Additional options of all calls, such as ``top_p``, ``top_k`` and ``seed``,
            the arguments of transformers' ``generate``, and ``mode``: ``"block"`` reuses passages
            (default); ``"full"`` uses ordinary attention over the same tokens.
    """

    prompt_options: ClassVar[tuple[str, ...]] = ()
    """Call options that affect the prompt. All other options go to the engine."""

    apart: ClassVar[tuple[str, ...]] = ("engine", *_OF_CLIENTS)

    source: EngineSource = Field(exclude=True, repr=False)
    max_tokens: int = Field(default=256, alias="max_new_tokens", gt=0)
    temperature: float | None = Field(default=None, ge=0)
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    streaming: bool = False
    recognize: Recognize = False
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def _source_of(cls, fields: dict[str, Any], arguments: dict[str, Any]) -> EngineSource:
        for name in _OF_CLIENTS:
            fields.pop(name, None)
        given = {name: value for name, value in arguments.items() if value is not None}
        source: EngineSource = fields.pop("source", None) or EngineSource(**given)
        # `configurable_fields` passes the old source with fields that may have changed.
        known = source.fields()
        if any(known.get(name) != value for name, value in given.items() if name in known):
            return source.asking_for(given)
        return source

    @property
    def engine(self) -> BlockAttentionEngine:
        return self.source.engine

    @model_validator(mode="after")
    def _check_recognizes(self) -> Self:
        if self.recognize:
            self.source.check_recognizes()
        return self

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Values that identify this model in traces and answer caches."""
        names = [n for n in GenerationFields.model_fields if n not in ("source", "block_template")]
        template = {"before": self.block_template.before, "after": self.block_template.after}
        known = {**{name: getattr(self, name) for name in names}, "block_template": template}
        return {**known, "engine": self.source.identity}

    def engine_options(self, stop: list[str] | None, call: dict[str, Any]) -> dict[str, Any]:
        """Return the engine options of a call. The call's options override the fields."""
        options = {
            "temperature": self.temperature,
            "max_new_tokens": self.max_tokens,
            **self.generate_kwargs,
            **call,
        }
        for name in ("stream", "ls_structured_output_format"):
            # These options are for LangChain.
            options.pop(name, None)
        if "max_tokens" in options:
            options["max_new_tokens"] = options.pop("max_tokens")
        options["stop"] = self.stop if stop is None else stop
        return {name: value for name, value in options.items() if name not in self.prompt_options}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params: LangSmithParams = super()._get_ls_params(  # type: ignore[misc]
            stop=stop or self.stop, **kwargs
        )
        params["ls_provider"] = PROVIDER
        return params

    @abstractmethod
    def _exchange(self, given: Any, stop: list[str] | None, call: dict[str, Any]) -> Exchange: ...

    @abstractmethod
    def _chunk(self, step: Step) -> Any: ...

    def _stream(
        self,
        given: Any,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        with closing(self._exchange(given, stop, kwargs).stream()) as steps:
            for chunk in map(self._chunk, steps):
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        given: Any,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        async with aclosing(self._exchange(given, stop, kwargs).astream()) as steps:
            async for step in steps:
                chunk = self._chunk(step)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def with_fallbacks(self, fallbacks: Sequence[Runnable[Any, Any]], **kwargs: Any) -> Any:
        """Like ``Runnable.with_fallbacks``, but removes block markers for models of other packages.

        Call it on the model itself: ``bind``, ``with_config`` and ``with_retry`` return LangChain
        runnables, whose ``with_fallbacks`` keeps the markers.
        """
        cleaned = [
            other if _is_own(other) else RunnableLambda(without_markers) | other
            for other in fallbacks
        ]
        return Runnable.with_fallbacks(cast(Runnable[Any, Any], self), cleaned, **kwargs)


def _is_own(runnable: Any) -> bool:
    """Whether this is a model of this package, with or without bound options."""
    while isinstance(runnable, RunnableBindingBase):
        runnable = runnable.bound
    return isinstance(runnable, GenerationFields)
