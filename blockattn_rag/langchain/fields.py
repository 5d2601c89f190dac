"""What the classes of this package have in common: fields that lead to an engine and its options.

LangChain copies, configures and pickles components by their pydantic fields, so all that a copy
needs to share the engine is a field.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, ClassVar, Protocol, cast

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
from blockattn_rag.engine.protocol import Engine
from blockattn_rag.engine.results import GenerationChunk, Mode
from blockattn_rag.langchain.cleaning import without_markers
from blockattn_rag.prompts.blocks import BlockPrompt, BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE

PROVIDER = "blockattn_rag"

_SOURCE_FIELDS = (
    *("model_name", "kv_store", "model_kwargs"),
    *("api_base", "recipe"),
)
_ALIASES = {
    "model": "model_name",
    "base_url": "api_base",
}

_OF_CLIENTS = {"timeout": "timeout_s", "max_retries": "retries"}
"""Arguments that LangChain's models of servers have, by their names in ``model_kwargs``."""


class EngineFields(BaseModel):
    """Fields of a component with an engine, which is loaded when it is first needed.

    Args:
        model_name (or model): path, hub id, ``"bundled"``, or a loaded transformers model.
        engine: a ready engine, shared with others; instead of all that says how to load one.
        llm: another component of this package, with options bound to it or not, to share model,
            store, template and recipe with; for components that are no models themselves.
        kv_store: the KV store: a directory, an address such as ``"s3://bucket/kv"`` (see
            ``store.open_store``), or a store object; default: 1 GiB of memory.
        recipe: How a model that is not block-fine-tuned runs in block mode: ``"auto"``, ``"none"``,
            or the folder of a recipe, which ``blockattn-rag repair`` writes. ``"auto"``, the
            default, takes the best one that is known, such as the one beside the store.
        model_kwargs: for loading the model, such as ``dtype``, ``device`` or ``tokenizer`` (one of
            transformers, or where to load it); with a server, for ``RemoteEngine``:
            ``timeout_s`` and ``retries``, for which LangChain's names ``timeout`` and
            ``max_retries`` may be given as arguments. These have no effect on a model of this
            process.
        base_url: address of a server with the model and the store (docs/guides/serving_vllm.md),
            such as ``"http://gpu:8000/v1"``; ``model`` is then its name there, and options that
            change how the model computes cannot be given.
        api_key: of the server, a string or ``SecretStr``; default: ``BLOCKATTN_RAG_API_KEY`` of the
            environment. It is no field: it is neither shown nor pickled.
        block_template: what stands around each passage. Ingestion and answers must agree on it;
            the default is that of the LlamaIndex adapter, so that both share what is stored.

    Raises:
        ValueError: no model, or more than one source of it.
        TypeError: an argument that the class does not have.
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
    """Where the engine comes from; copies share it, and so one set of weights."""

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
            if given or any(one is not None for one in (engine, source, api_key)):
                raise ValueError("give either llm=, or the model, store and recipe, not both")
            source = source_of(llm, "ChatBlockAttention")
            rest.setdefault("block_template", llm.block_template)
        if source is None:
            source = EngineSource(engine, **given, api_key=api_key)
        # configurable_fields gives a source and fields that may ask for another one.
        known = source.fields()
        if any(known[name] != value for name, value in given.items()):
            source = source.asking_for(given)
        return {**rest, **source.fields(), "source": source}

    @property
    def engine(self) -> Engine:
        """The engine that does the work; the first use loads the model."""
        return self.source.engine


def _with_client(model_kwargs: dict[str, Any], asking: dict[str, Any]) -> dict[str, Any]:
    """``model_kwargs`` with arguments that LangChain's models of servers have."""
    given = {name: value for name, value in asking.items() if value is not None}
    if twice := [name for name in given if _OF_CLIENTS[name] in model_kwargs]:
        raise ValueError(
            f"found {twice[0]} and model_kwargs={{{_OF_CLIENTS[twice[0]]!r}: ...}}, expected "
            "one of them"
        )
    return {**model_kwargs, **{_OF_CLIENTS[name]: value for name, value in given.items()}}


class Exchange(Protocol):
    """One call: a prompt, made once, and the reading of what comes back."""

    def prompt(self) -> BlockPrompt:
        """The blocks of the prompt, which is about to be answered."""

    def chunk(self, piece: GenerationChunk) -> Any:
        """A piece of the answer, as LangChain streams it."""


class GenerationFields(EngineFields):
    """Fields of a language model: defaults of every call, which the call's own options override.

    Args:
        mode: ``"block"`` reuses passages; ``"full"`` is ordinary attention over the same tokens.
        max_tokens (or max_new_tokens): longest answer.
        temperature: None or 0 is greedy; ``top_p`` and ``top_k`` apply above 0.
        stop (or stop_sequences): strings that end the answer and are not part of it.
        streaming: whether ``invoke`` streams inside, so that callbacks see tokens as they come.
        generate_kwargs: further options of every call, such as ``top_p``, ``top_k`` and ``seed``,
            and whatever transformers' ``generate`` takes.
    """

    takes_llm: ClassVar[bool] = False
    prompt_options: ClassVar[tuple[str, ...]] = ()
    """Options of calls that shape the prompt; the engine gets the others."""

    mode: Mode = "block"
    max_tokens: int = Field(default=256, alias="max_new_tokens", gt=0)
    temperature: float | None = Field(default=None, ge=0)
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    streaming: bool = False
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What traces and answer caches know this model by: plain values, nothing live."""
        names = [n for n in GenerationFields.model_fields if n not in ("source", "block_template")]
        template = {"before": self.block_template.before, "after": self.block_template.after}
        known = {**{name: getattr(self, name) for name in names}, "block_template": template}
        return {**known, "engine": self.source.identity}

    def engine_options(self, stop: list[str] | None, call: dict[str, Any]) -> dict[str, Any]:
        """The engine's keyword arguments for one call: what the call says, else the fields."""
        options = {
            "mode": self.mode,
            "temperature": self.temperature,
            "max_new_tokens": self.max_tokens,
            **self.generate_kwargs,
            **call,
        }
        for name in ("stream", "ls_structured_output_format"):  # LangChain's own
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
    def _exchange(self, given: Any, call: dict[str, Any]) -> Exchange:
        """A call with a prompt, which is a string or messages, and with options."""

    def _stream(
        self,
        given: Any,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        exchange, options = self._exchange(given, kwargs), self.engine_options(stop, kwargs)
        with closing(self.engine.stream(exchange.prompt(), **options)) as pieces:
            for chunk in map(exchange.chunk, pieces):
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
        exchange, options = self._exchange(given, kwargs), self.engine_options(stop, kwargs)
        async with aclosing(self.source.astream(exchange.prompt, options)) as pieces:
            async for piece in pieces:
                chunk = exchange.chunk(piece)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def with_fallbacks(self, fallbacks: Sequence[Runnable[Any, Any]], **kwargs: Any) -> Any:
        """As any runnable's. Fallbacks that are no models of this package get their prompts without
        the markers of passages, which would be noise to them.

        Call it on the model itself: what ``bind``, ``with_config`` and ``with_retry`` return is a
        runnable of LangChain, whose own ``with_fallbacks`` knows no markers.
        """
        cleaned = [
            other if _is_own(other) else RunnableLambda(without_markers) | other
            for other in fallbacks
        ]
        return Runnable.with_fallbacks(cast(Runnable[Any, Any], self), cleaned, **kwargs)


def _is_own(runnable: Any) -> bool:
    """Whether this is a model of this package, with options bound to it or not."""
    while isinstance(runnable, RunnableBindingBase):
        runnable = runnable.bound
    return isinstance(runnable, GenerationFields)
