"""vLLM's engine client, asked once more where the blocks of a prompt were lost in between."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from vllm.exceptions import RetryableRequestError

from blockattn_rag.errors import ProtocolError
from blockattn_rag.serving.protocol import FIELD, ServedBlocks


@dataclass(slots=True)
class Ticket:
    """A request in block mode on its way through vLLM's handlers.

    Args:
        ensure_again: have all its blocks stored, looking at each closely; returns how many were
            encoded, and their tokens.
        encoded: blocks that were encoded for it, and ``encoded_tokens``.
        marker: what its answer says of its blocks, as soon as that is known.
    """

    ensure_again: Callable[[], Awaitable[tuple[int, int]]]
    encoded: int = 0
    encoded_tokens: int = 0
    marker: dict[str, Any] | None = None


CURRENT: ContextVar[Ticket | None] = ContextVar("blockattn_ticket", default=None)
"""The ticket of the request that is being handled."""


class RetryingClient:
    """An engine client whose requests in block mode get a second try.

    A request whose blocks could not be loaded ends in an error before its first token. It is asked
    anew, once, after its blocks were looked at closely. Once a token was sent, it is too late.

    Args:
        client: vLLM's, which does all the rest.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """As vLLM's; the last output of a request in block mode says what was encoded for it."""
        ticket = CURRENT.get()
        if ticket is None:
            outputs: AsyncGenerator[Any, None] = self._client.generate(
                prompt, sampling_params, request_id, **options
            )
            return outputs
        return self._generate(ticket, prompt, sampling_params, request_id, options)

    async def _generate(
        self,
        ticket: Ticket,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[Any, None]:
        first = self._client.generate(prompt, sampling_params.clone(), request_id, **options)
        begun = False
        async for output in first:
            if _failed(output) and not begun:
                break
            begun = True
            yield _marked(output, ticket)
        else:
            return
        await first.aclose()
        encoded, tokens = await ticket.ensure_again()
        ticket.encoded += encoded
        ticket.encoded_tokens += tokens
        again = self._client.generate(prompt, sampling_params, f"{request_id}-again", **options)
        async for output in again:
            if _failed(output):
                raise RetryableRequestError(
                    "the blocks of the prompt could not be loaded, or the engine failed, twice; "
                    "the server's log says why"
                )
            yield _marked(output, ticket)


_WHOLE = ("stop", "length")


def _failed(output: Any) -> bool:
    return any(one.finish_reason == "error" for one in output.outputs)


def _marked(output: Any, ticket: Ticket) -> Any:
    """An output whose marker, if it has one, also tells what was encoded beforehand."""
    if output.kv_transfer_params and FIELD in output.kv_transfer_params:
        served = ServedBlocks.from_dict(output.kv_transfer_params)
        ticket.marker = replace(
            served, encoded=ticket.encoded, encoded_tokens=ticket.encoded_tokens
        ).to_dict()
        output.kv_transfer_params = ticket.marker
    elif ticket.marker is None and any(one.finish_reason in _WHOLE for one in output.outputs):
        raise ProtocolError("the engine answered without a word of blocks: is the connector there?")
    return output
