"""Pydantic fields of components with an engine, and of language models.

LangChain copies, configures and pickles components by their fields, so the engine source is a field
too.
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
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.engine_source import EngineSource, source_of
from blockattn_rag.adapters.exchange import Exchange, Step
from blockattn_rag.engine.protocol import Engine
from blockattn_rag.langchain.messages import PROVIDER, without_markers
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.recognition import Recognize

_SOURCE_FIELDS = ("model_name", "kv_store", "model_kwargs", "api_base", "recipe")
_ALIASES = {"model": "model_name", "base_url": "api_base"}

_OF_CLIENTS = {"timeout": "timeout_s", "max_retries": "retries"}
"""Names of arguments in LangChain's client models, and the matching names in ``model_kwargs``."""


class EngineFields(BaseModel):
    """Fields of a component with an engine.

    Args:
        model_name (or model): Path, hub id, ``"bundled"``, or a loaded transformers model.
        engine: An existing engine, instead of the arguments for loading one.
        llm: Another component, with or without bound options, whose model, store, template and
            recipe are shared. Not for language models.
        kv_store: KV store: a directory, an address such as ``"s3://bucket/kv"`` (see
            ``store.open_store``), or a store object. Default: 1 GiB of memory.
        recipe: How a model that is not block-fine-tuned runs in block mode: ``"auto"``, ``"none"``,
            or the folder of a recipe, which ``blockattn-rag repair`` writes. ``"auto"`` uses the
            best known recipe, such as the recipe next to the store. Default: ``"auto"``.
        model_kwargs: Arguments for loading the model, such as ``dtype``, ``device`` or
            ``tokenizer`` (an object, name or path). With a server: the arguments ``timeout_s`` and
            ``retries`` of ``RemoteEngine``, which may also be passed as ``timeout`` and
            ``max_retries``, their names in LangChain.
        base_url: Address of a server with the model and the store (docs/guides/serving_vllm.md),
            such as ``"http://gpu:8000/v1"``; ``model`` is then the model's name on the server.
        api_key: API key of the server, a string or ``SecretStr``. It is not a field, so it is
            neither shown nor pickled. Default: ``BLOCKATTN_RAG_API_KEY`` of the environment.
        block_template: Text around each passage. Ingestion and answers must use the same template.
            The LlamaIndex adapter has the same default, so both adapters share stored passages.

    Raises:
        ValueError: No model is given, or several models are given.
        TypeError: An argument is unknown.
    """

    model_config = ConfigDict(
        populate_by_name=True, arbitrary_types_allowed=True, protected_namespaces=()
    )

    takes_llm: ClassVar[bool] = True

    model_name: str | None = Field(default=None, alias="model")
    kv_store: str | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    api_base: str | None = Field(default=None, alias="base_url")
    block_template: BlockTemplate = BLANK_LINE
    recipe: str = "auto"
    source: EngineSource = Field(exclude=True, repr=False)
    """Source of the engine. Copies of a component share it, and therefore the weights."""

    @model_validator(mode="before")
    @classmethod
    def _find_source(cls, values: dict[str, Any]) -> dict[str, Any]:
        aliases = {field.alias for field in cls.model_fields.values() if field.alias}
        apart = ("engine", "api_key", *(("llm",) if cls.takes_llm else ()))
        known_names = [*cls.model_fields, *aliases, *_ALIASES, *_OF_CLIENTS, *apart]
        check_known(cls, values, known_names)
        rest = {_ALIASES.get(name, name): value for name, value in values.items()}
        llm, engine, api_key = (rest.pop(name, None) for name in ("llm", "engine", "api_key"))
        asking = {name: rest.pop(name, None) for name in _OF_CLIENTS}
        if isinstance(api_key, SecretStr):
            api_key = api_key.get_secret_value()
        given = {k: v for k in _SOURCE_FIELDS if (v := rest.pop(k, None)) is not None}
        if "api_base" in given:
            given["model_kwargs"] = _with_client(given.get("model_kwargs", {}), asking)
        source: EngineSource | None = rest.pop("source", None)
        if llm is not None:
            others = (*given.values(), engine, source, api_key)
            source = source_of(llm, "ChatBlockAttention", *others)
            rest.setdefault("block_template", llm.block_template)
        if source is None:
            source = EngineSource(engine, **given, api_key=api_key)
        # configurable_fields passes the old source together with fields that may have changed.
        known = source.fields()
        if any(known[name] != value for name, value in given.items()):
            source = source.asking_for(given)
        return {**rest, **source.fields(), "source": source}

    @property
    def engine(self) -> Engine:
        """The engine. The first use loads the model."""
        return self.source.engine


def _with_client(model_kwargs: dict[str, Any], asking: dict[str, Any]) -> dict[str, Any]:
    """Add the arguments of LangChain's client models to ``model_kwargs``."""
    given = {name: value for name, value in asking.items() if value is not None}
    if twice := [name for name in given if _OF_CLIENTS[name] in model_kwargs]:
        raise ValueError(
            f"Found both {twice[0]} and model_kwargs={{{_OF_CLIENTS[twice[0]]!r}: ...}}, expected "
            "only one of them"
        )
    return {**model_kwargs, **{_OF_CLIENTS[name]: value for name, value in given.items()}}


class GenerationFields(EngineFields):
    """Fields of a language model: default options of all calls. A call's own options override them.

    Args:
        max_tokens (or max_new_tokens): Maximum number of tokens in an answer.
        temperature: Sampling temperature. None or 0: greedy decoding.
        stop (or stop_sequences): Strings that end the answer. The answer excludes them.
        streaming: Whether ``invoke`` streams internally, so that callbacks receive tokens early.
        recognize: Whether to also find ingested passages in text without markers. Prompts then need
            no ``format_blocks``. ``"system"``: also in system messages. Not with ``base_url``,
            because a server has its own option.
        generate_kwargs: Further options of every call, such as ``top_p``, ``top_k`` and ``seed``,
            the arguments of transformers' ``generate``, and ``mode``: ``"block"`` reuses passages
            (default); ``"full"`` is ordinary attention over the same tokens.
    """

    takes_llm: ClassVar[bool] = False
    prompt_options: ClassVar[tuple[str, ...]] = ()
    """Options of a call that affect the prompt. The engine receives all other options."""

    max_tokens: int = Field(default=256, alias="max_new_tokens", gt=0)
    temperature: float | None = Field(default=None, ge=0)
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    streaming: bool = False
    recognize: Recognize = False
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_recognizes(self) -> Self:
        if self.recognize:
            self.source.check_recognizes()
        return self

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Identity of this model in traces and answer caches, as plain values."""
        names = [n for n in GenerationFields.model_fields if n not in ("source", "block_template")]
        template = {"before": self.block_template.before, "after": self.block_template.after}
        known = {**{name: getattr(self, name) for name in names}, "block_template": template}
        return {**known, "engine": self.source.identity}

    def engine_options(self, stop: list[str] | None, call: dict[str, Any]) -> dict[str, Any]:
        """Engine options of one call. The call's options override the fields."""
        options = {
            "temperature": self.temperature,
            "max_new_tokens": self.max_tokens,
            **self.generate_kwargs,
            **call,
        }
        for name in ("stream", "ls_structured_output_format"):  # for LangChain itself
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
    def _exchange(self, given: Any, stop: list[str] | None, call: dict[str, Any]) -> Exchange:
        """Create a call from messages and options."""

    @abstractmethod
    def _chunk(self, step: Step) -> Any:
        """Convert a step of an answer to a chunk of LangChain."""

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
        """Like ``Runnable.with_fallbacks``, but models of other packages get no block markers.

        Call it on the model itself. ``bind``, ``with_config`` and ``with_retry`` return LangChain's
        own runnables, whose ``with_fallbacks`` keeps the markers.
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
