"""Base classes of components with a model, which can be reloaded from their fields."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseComponent

from blockattn_rag.adapters.sources import EngineSource, Source
from blockattn_rag.engine.engine import BlockAttentionEngine


class SourceComponent(BaseComponent):
    """LlamaIndex component with a model, in this process or on a server.

    The fields are sufficient to reload the model, in another process or from ``to_dict``.
    Components created from a model, engine or store object cannot be pickled.
    """

    model_name: str | None = Field(default=None, description="Name or path of the model.")
    tokenizer_name: str | None = Field(
        default=None, description="Name or path of the tokenizer. Default: model_name."
    )
    kv_store: str | None = Field(
        default=None, description="Directory or address of the KV store. Default: in memory."
    )
    device_map: str = Field(
        default="auto", description="Device of the model, such as 'cuda:0', or 'auto'."
    )
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Additional arguments for loading the model."
    )
    recipe: str = Field(default="auto", description="Recipe of block mode.")

    _source: Source = PrivateAttr()

    @property
    def source(self) -> Source:
        """Source of the model. Components with the same source share it."""
        return self._source

    def __getstate__(self) -> dict[str, Any]:
        # LlamaIndex would silently drop a source that cannot be pickled.
        self._source.__reduce__()
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> SourceComponent:
        # Weights and locks are shared, never copied.
        return self.model_copy()


class EngineComponent(SourceComponent):
    """LlamaIndex component whose model runs in this process."""

    _source: EngineSource = PrivateAttr()

    @property
    def source(self) -> EngineSource:
        """Source of the engine. Components with the same source share the model."""
        return self._source

    @property
    def engine(self) -> BlockAttentionEngine:
        return self._source.engine
