"""Connectors for tests: one whose loads wait, and one whose keys rotate differently."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockattn_rag.server.profile import LayerProfile
from blockattn_rag.server.vllm.connector import BlockAttentionConnector

GATE = "BLOCKATTN_TEST_GATE"
"""Environment variable with the path of the file."""


class SlowConnector(BlockAttentionConnector):
    """Connector whose loads end when the file is deleted, or after 30 seconds."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        loader = self.worker._loader
        start, threads = loader.start, ThreadPoolExecutor(32)

        def started(*args: Any) -> Future[Any]:
            loaded = start(*args)
            return threads.submit(_waited, loaded)

        setattr(loader, "start", started)  # noqa: B010


def _waited(loaded: Future[Any]) -> Any:
    gate, until = Path(os.environ[GATE]), time.monotonic() + 30
    while gate.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return loaded.result()


class RotatedConnector(BlockAttentionConnector):
    """Connector with a profile whose keys rotate twice as fast."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layers = tuple(map(_faster, self._profile.layers))
        self._profile = replace(self._profile, layers=layers)
        super().register_kv_caches(kv_caches)


def _faster(layer: LayerProfile) -> LayerProfile:
    layout = replace(layer.layout, frequencies=2 * layer.layout.frequencies)
    return replace(layer, layout=layout)
