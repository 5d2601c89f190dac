"""Base class of components with a model, which can be reloaded from their fields."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseComponent

from blockattn_rag.adapters.sources import Source


class SourceComponent(BaseComponent):
    """LlamaIndex component with a model, in this process or on a server. The fields are sufficient
    to reload the model, unless it was created from live objects."""

    model_name: str | None = None
    tokenizer_name: str | None = None
    kv_store: str | None = None
    device_map: str = "auto"
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    recipe: str = "auto"

    _source: Source = PrivateAttr()

    @property
    def source(self) -> Source:
        """Source of the model. Components with the same source share the model."""
        return self._source

    @classmethod
    def class_name(cls) -> str:
        return cls.__name__

    def __getstate__(self) -> dict[str, Any]:
        # LlamaIndex would silently drop a source that cannot be pickled.
        self._source.__reduce__()
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> SourceComponent:
        # Weights and locks are shared, never copied.
        return self.model_copy()
