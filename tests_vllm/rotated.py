"""A connector whose profile has different rotations than vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockattn_rag.server.profile import Rotary
from blockattn_rag.server.vllm.connector import BlockAttentionConnector


class RotatedConnector(BlockAttentionConnector):
    """Connector with a profile whose keys rotate twice as fast."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        profile = self._profile
        faster = tuple(
            Rotary(rotary.pairing, tuple(2 * frequency for frequency in rotary.frequencies))
            for rotary in profile.rotary
        )
        self._profile = replace(profile, rotary=faster)
        super().register_kv_caches(kv_caches)
