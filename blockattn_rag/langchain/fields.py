"""Base classes with the pydantic fields of components that have a model."""

from __future__ import annotations

from abc import abstractmethod
from importlib.util import find_spec
from typing import Any, ClassVar

from langchain_core.language_models.model_profile import ModelProfile
from pydantic import BaseModel, ConfigDict, Field, model_validator

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.sources import EngineSource, Source
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.output import tool_template
from blockattn_rag.output.answers import marks_thoughts
from blockattn_rag.output.tool_use import TOOL_OPTIONS
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.recognition import Recognize

_SOURCE_ARGUMENTS = ("engine", "model_name", "kv_store", "model_kwargs", "recipe")
_OF_CLIENTS = ("timeout", "max_retries")
# Call options that are not passed to the engine, because they affect the prompt or LangChain.
_NOT_FOR_ENGINES = {
    *TOOL_OPTIONS,
    *("chat_template_kwargs", "stream", "ls_structured_output_format"),
}


class SourceFields(BaseModel):
    """Fields of a component with a model, in this process or on a server.

    Args:
        model_name (or model): Path, hub id, ``"bundled"``, or a loaded transformers model.
        engine: An existing engine. Replaces the arguments for loading one.
        kv_store: KV store: a directory, an address such as ``"s3://bucket/kv"`` (see
            ``store.open_store``), or a store object. Default: 1 GiB in memory.
        recipe: Recipe for block mode, for models that are not block-fine-tuned: ``"auto"``,
            ``"none"``, or a folder written by ``blockattn-rag repair``. ``"auto"`` uses the best
            known recipe, such as the one next to the store. Default: ``"auto"``.
        model_kwargs: Arguments for loading the model, such as ``dtype``, ``device`` or
            ``tokenizer`` (an object, name or path).
        block_template: Text around each passage. Ingestion and answers must use the same template.

    Raises:
        ValueError: Neither a model nor an engine was passed, or both, or a recipe with an engine.
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
    source: Source = Field(exclude=True, repr=False)
    """Source of the model, which copies share. LangChain copies only fields, so this is a field."""

    @model_validator(mode="before")
    @classmethod
    def _find_source(cls, values: dict[str, Any]) -> dict[str, Any]:
        aliases = [field.alias for field in cls.model_fields.values() if field.alias]
        check_known(cls, values, [*cls.model_fields, *aliases, *cls.apart])
        fields = dict(values)
        if "model" in fields:
            fields["model_name"] = fields.pop("model")
        arguments = {name: fields.pop(name, None) for name in _SOURCE_ARGUMENTS}
        source = cls._source_of(fields, arguments)
        return {**fields, **source.fields(), "source": source}

    @classmethod
    @abstractmethod
    def _source_of(cls, fields: dict[str, Any], arguments: dict[str, Any]) -> Source:
        """Create the source of the model from a constructor's arguments."""


class GenerationFields(SourceFields):
    """Fields of an in-process language model: the default options of all calls.

    Options of a call override them. LangChain's standard arguments ``timeout`` and ``max_retries``
    have no effect in this process.

    Args:
        max_tokens (or max_new_tokens): Maximum number of tokens in an answer.
        temperature: Sampling temperature. None or 0: greedy decoding.
        stop (or stop_sequences): Strings that end the answer, and are not included in it.
        streaming: Whether ``invoke`` streams internally, so that callbacks receive tokens as they
            are generated.
        recognize: Whether to also recognize ingested passages in text without markers, so that
            prompts do not need ``format_blocks``. ``"system"``: also in system messages.
        generate_kwargs: Additional options of all calls, such as ``top_p``, ``top_k`` and ``seed``,
            the arguments of transformers' ``generate``, and ``mode``: ``"block"`` reuses passages
            (default); ``"full"`` uses ordinary attention over the same tokens.
    """

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
        # `configurable_fields` passes the old source with fields that may have changed.
        source: EngineSource | None = fields.pop("source", None)
        return EngineSource(**given) if source is None else source.with_fields(given)

    @property
    def engine(self) -> BlockAttentionEngine:
        return self.source.engine

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
        if "max_tokens" in options:
            options["max_new_tokens"] = options.pop("max_tokens")
        options["stop"] = self.stop if stop is None else stop
        return {name: value for name, value in options.items() if name not in _NOT_FOR_ENGINES}


def profile_of(source: EngineSource) -> ModelProfile:
    tokenizer = source.tokenizer.tokenizer
    calls_tools = tool_template(tokenizer) is not None
    follows_grammars = find_spec("llguidance") is not None
    return ModelProfile(
        max_input_tokens=source.engine.model.max_context_tokens,
        open_weights=True,
        text_inputs=True,
        image_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        reasoning_output=marks_thoughts(tokenizer),
        tool_calling=calls_tools,
        tool_choice=calls_tools and follows_grammars,
        tool_call_streaming=calls_tools,
        structured_output=follows_grammars,
    )
