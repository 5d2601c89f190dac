"""The entry points by which vLLM finds this package: its connector, and its endpoints."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from blockattn_rag.server.config import CONNECTOR

if TYPE_CHECKING:
    from fastapi import FastAPI


def register() -> None:
    """Make the connector known by its name. May be called again and again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(
            CONNECTOR, "blockattn_rag.server.vllm.connector", CONNECTOR
        )


class BlockAttentionEndpoints:
    """The routes of ``serving.endpoint``, for ``vllm serve`` with ``VLLM_PLUGINS=blockattn``."""

    name = "blockattn"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        from blockattn_rag.server.vllm.routes import router

        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Open the store that the connector of this server uses.

        Raises:
            ServingError: the server has no connector of this package.
            StoreError, ValueError: as the connector itself.
        """
        from blockattn_rag.server.vllm.service import Service

        state.blockattn = Service.of(engine_client, state)
