"""A connector whose profile has different rotations than vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockattn_rag.server.profile import LayerProfile
from blockattn_rag.server.vllm.connector import BlockAttentionConnector


class RotatedConnector(BlockAttentionConnector):
    """Connector with a profile whose keys rotate twice as fast."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layers = tuple(map(_faster, self._profile.layers))
        self._profile = replace(self._profile, layers=layers)
        super().register_kv_caches(kv_caches)


def _faster(layer: LayerProfile) -> LayerProfile:
    layout = replace(layer.layout, frequencies=2 * layer.layout.frequencies)
    return replace(layer, layout=layout)
