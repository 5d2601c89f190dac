"""vLLM entry points for this package's connector and endpoints."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from blockattn_rag.server.config import CONNECTOR

if TYPE_CHECKING:
    from fastapi import FastAPI


def register() -> None:
    """Register the connector under its name. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # already registered
        KVConnectorFactory.register_connector(
            CONNECTOR, "blockattn_rag.server.vllm.connector", CONNECTOR
        )


class BlockAttentionEndpoints:
    """Block-mode routes for ``vllm serve``, enabled by ``VLLM_PLUGINS=blockattn``."""

    name = "blockattn"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        from blockattn_rag.server.vllm.routes import router

        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Create the service, with the store that this server's connector uses."""
        from blockattn_rag.server.vllm.service import Service

        state.blockattn = Service.of(engine_client, state)
