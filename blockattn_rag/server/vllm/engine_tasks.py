"""Requests of the API server to its engine, for tasks other than answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from vllm import SamplingParams

from blockattn_rag.errors import ServingError
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.vllm.requests import Encodable
from blockattn_rag.server.vllm.scheduler import UNSAVED

_REPORTED_TOKENS = 2
"""Tokens to generate if workers must report. They report with the step of the first token, and an
idle engine runs no steps."""

_FIRST_ASKED_S, _ASKED_EVERY_S = 0.1, 0.5
"""Seconds until the engine is first asked why a block is not stored yet, and between later
questions."""


class EngineTasks:
    def __init__(self, engine_client: Any, config: ServingConfig) -> None:
        self._engine_client = engine_client
        self._secret = config.tenant_secret

    async def encode(self, one: Encodable, request_id: str) -> None:
        """Encode a block. Raises ServingError if the engine fails."""
        reason = None
        asked = {"prompt_token_ids": one.token_ids}
        params = one.plan.to_dict(self._secret)
        async for output in self._generate(asked, params, request_id, 1):
            reason = output.outputs[0].finish_reason
        if reason not in ("length", "stop"):
            raise ServingError(
                f"A block of {one.tokens} tokens was not encoded (request {request_id} "
                f"ended by {reason!r}); see the server's log"
            )

    async def why_not_stored(self, request_id: str) -> str:
        """Ask the engine until it answers why the block of an encoding request could not be
        stored."""
        pause = _FIRST_ASKED_S
        while True:
            await asyncio.sleep(pause)
            name = f"blockattn-unsaved-{uuid.uuid4().hex}"
            async for output in self._generate(
                {"prompt_token_ids": [0]}, {UNSAVED: request_id}, name, _REPORTED_TOKENS
            ):
                if why := (output.kv_transfer_params or {}).get(UNSAVED):
                    return str(why)
            pause = _ASKED_EVERY_S

    def _generate(
        self, asked: dict[str, Any], params: dict[str, Any], request_id: str, tokens: int
    ) -> AsyncGenerator[Any, None]:
        """Generate exactly ``tokens`` tokens, which nobody reads."""
        sampling = SamplingParams(
            max_tokens=tokens,
            min_tokens=0 if tokens == 1 else tokens,
            temperature=0.0,
            detokenize=False,
            extra_args={"kv_transfer_params": params},
        )
        outputs: AsyncGenerator[Any, None]
        outputs = self._engine_client.generate(asked, sampling, request_id)
        return outputs
