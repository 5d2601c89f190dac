"""Asks the engine how much the final blocks of prompts attend to their context blocks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm import SamplingParams

from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.protocol import FIELD
from blockattn_rag.server.vllm.requests import BlockRequest
from blockattn_rag.server.vllm.scheduler import ATTENTION

_TOKENS = 2
"""Tokens that a measurement generates. Workers report with the step of the first one."""


class Scorer:
    """Sends measurements to the engine.

    Args:
        engine_client: Client of vLLM's engine.
        config: Options of the connector.
    """

    def __init__(self, engine_client: Any, config: ServingConfig) -> None:
        self._engine_client = engine_client
        self._config = config
        self._secret = config.tenant_secret

    async def attention(self, prompt: BlockRequest) -> Sequence[float] | None:
        """Share of the final block's attention for each context block: mean over layers, heads and
        tokens. None if the engine failed, for example because it could not load a block.

        No other request shares its pages, so that all tokens of the final block are computed.
        """
        plan = replace(prompt.plan, op="score", passages=())
        sampling = SamplingParams(
            max_tokens=_TOKENS,
            min_tokens=_TOKENS,
            temperature=0.0,
            detokenize=False,
            extra_args={"kv_transfer_params": plan.to_dict(self._secret, self._config.namespace)},
        )
        name = uuid.uuid4().hex
        asked = {"prompt_token_ids": list(prompt.token_ids), "cache_salt": name}
        found: Sequence[float] | None = None
        outputs = self._engine_client.generate(asked, sampling, f"blockattn-score-{name}")
        async for output in outputs:
            found = ((output.kv_transfer_params or {}).get(FIELD) or {}).get(ATTENTION)
        return found
