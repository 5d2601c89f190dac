"""Source of ingestion steps that encodes on servers instead of in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE


class ServerSource:
    """Servers that encode passages into their store, with the interface of ``EngineSource``.

    Args:
        server: Address of a server, or addresses of several servers that share a store.
        api_key: API key of the servers. Neither included in ``fields`` nor pickled; other processes
            read it from the environment variable ``BLOCKATTN_RAG_API_KEY``.
        journal: Folder of a journal (see ``ServerPool``).

    Raises:
        ValueError: An address is invalid, or the list is empty.
    """

    live_parts: Sequence[str] = ()

    def __init__(
        self,
        server: str | Sequence[str],
        api_key: str | None = None,
        journal: str | Path | None = None,
    ) -> None:
        from blockattn_rag.server import ServerClient, ServerPool  # Requires the extra `serving`.

        clients = [ServerClient(url, api_key) for url in _addresses(server)]
        urls = [client.url for client in clients]
        self._pool = ServerPool(clients, journal)
        self._server = urls[0] if isinstance(server, str) else urls
        self._journal = None if journal is None else str(journal)

    def fields(self) -> dict[str, Any]:
        """Constructor arguments of an equal source, without the API key."""
        return {"server": self._server, "journal": self._journal}

    @property
    def lasting_store(self) -> str:
        """Addresses of the servers, separated by spaces. Other processes use them as the store."""
        return " ".join(_addresses(self._server))

    @property
    def storage(self) -> dict[str, Any]:
        info = self._pool.info
        return {
            "fingerprint": info.fingerprint,
            "store": self.lasting_store,
            "namespace": info.namespace,
            "encoding": [*info.recipe.encoding],
        }

    def encode(
        self, texts: Sequence[str], template: BlockTemplate, *, show_progress: bool
    ) -> EncodeStats:
        """Encode passages that are not stored yet."""
        if template != BLANK_LINE:
            raise ValueError(
                f"Unsupported block_template={template}: servers use {BLANK_LINE}; remove the "
                "argument"
            )
        return self._pool.encode(texts, show_progress=show_progress)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ServerSource:
        return self  # Connections are shared, never copied.

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerSource, (self._server, None, self._journal)


def _addresses(server: str | Sequence[str]) -> Sequence[str]:
    return [server] if isinstance(server, str) else server
