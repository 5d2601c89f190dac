"""Base class of components with an engine, with fields that describe how to load the engine."""

from __future__ import annotations

import pickle
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseComponent

from blockattn_rag.adapters.engine_source import EngineSource
from blockattn_rag.engine.protocol import Engine


class EngineComponent(BaseComponent):
    """A LlamaIndex component with an engine.

    The fields describe how to load the engine again, in another process or from ``to_dict``.
    Components with live objects cannot be pickled. The API key of a server is not a field. Other
    processes read it from their environment.
    """

    model_name: str | None = Field(description="Name or path of the model.")
    tokenizer_name: str | None = Field(description="Name or path of the tokenizer. None: as model.")
    kv_store: str | None = Field(description="Directory or address of the KV store. None: memory.")
    device_map: str = Field(description="Device of the model, such as 'cuda:0', or 'auto'.")
    model_kwargs: dict[str, Any] = Field(description="Further arguments for loading the model.")
    api_base: str | None = Field(description="Address of a server with the model. None: local.")
    recipe: str = Field(description="How the model runs in block mode.")

    _source: EngineSource = PrivateAttr()

    @property
    def source(self) -> EngineSource:
        """Source of the engine. Components with the same source share the model."""
        return self._source

    @property
    def engine(self) -> Engine:
        """The engine. The first use loads the model."""
        return self._source.engine

    def __getstate__(self) -> dict[str, Any]:
        if live := self._source.live_parts:
            raise pickle.PicklingError(
                f"This {type(self).__name__} was built from a live {' and '.join(live)}, which "
                "cannot be sent to another process; pass model_name= and kv_store= (a directory or "
                "an address), or run the ingestion pipeline without num_workers"
            )
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> EngineComponent:
        # Weights and locks are shared, never copied.
        return self.model_copy()
