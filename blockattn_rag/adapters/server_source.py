"""Server as the source of ingestion steps, instead of an engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE


class ServerSource:
    """Server that encodes passages into its own store, with the methods of ``EngineSource``.

    Args:
        api_key: API key of the server. It is neither part of ``fields`` nor pickled. Other
            processes read it from the environment variable ``BLOCKATTN_RAG_API_KEY``.
    """

    live_parts: Sequence[str] = ()

    def __init__(self, url: str, api_key: str | None = None) -> None:
        from blockattn_rag.server import ServerClient  # needs the extra `serving`

        self.client = ServerClient(url, api_key)

    def fields(self) -> dict[str, Any]:
        """Arguments that create an equal source, without the API key."""
        return {"server": self.client.url}

    @property
    def lasting_store(self) -> str:
        """Location of the store, which other processes can reach."""
        return self.client.url

    @property
    def storage(self) -> dict[str, Any]:
        info = self.client.info
        return {
            "fingerprint": info.fingerprint,
            "store": self.client.url,
            "namespace": info.namespace,
            "encoding": [*info.recipe.encoding],
        }

    def encode(
        self, texts: Sequence[str], template: BlockTemplate, *, show_progress: bool
    ) -> EncodeStats:
        """Encode passages that are not stored yet."""
        if template != BLANK_LINE:
            raise ValueError(
                f"Found block_template={template}, but servers use {BLANK_LINE}; leave it out"
            )
        return self.client.encode(texts, show_progress=show_progress)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ServerSource:
        return self  # connections are shared, never copied

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerSource, (self.client.url,)
