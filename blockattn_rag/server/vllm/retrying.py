"""Retries failed block-mode requests, and collects reuse reports."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.exceptions import RetryableRequestError

from blockattn_rag.errors import GrammarError, ProtocolError
from blockattn_rag.server.plan import ServedBlocks
from blockattn_rag.server.protocol import FIELD
from blockattn_rag.server.vllm.answers import Ticket
from blockattn_rag.server.vllm.metrics import CUT_ANSWERS, RETRIES
from blockattn_rag.server.vllm.scheduler import GRAMMAR_FAILURE

_COMPLETE = ("stop", "length", "repetition")

CURRENT: ContextVar[Ticket | None] = ContextVar("blockattn_ticket", default=None)
"""Ticket of the current request."""


class RetryingClient:
    """Engine client that retries block-mode requests once.

    A request whose blocks cannot be loaded fails before its first token, and is retried after a
    thorough check of its blocks. After the first token, no retry is possible.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Generate like vLLM's client. In block mode, add the reuse report to the ticket."""
        generate = partial(self._client.generate, prompt, **options)
        if (ticket := CURRENT.get()) is None:
            return _checked(generate(sampling_params, request_id))
        return _retried(ticket, generate, sampling_params, request_id)


async def _retried(
    ticket: Ticket,
    generate: Callable[[Any, str], AsyncGenerator[Any, None]],
    sampling_params: Any,
    request_id: str,
) -> AsyncGenerator[Any, None]:
    first = _checked(generate(sampling_params.clone(), request_id))
    begun = False
    async for output in first:
        if _failed(output) and not begun:
            break
        begun = True
        _take_report(output, ticket)
        yield output
    else:
        return
    await first.aclose()
    RETRIES.inc()
    encoded_again = await ticket.ensure_again()
    ticket.encoded = {**ticket.encoded, **encoded_again}
    async for output in _checked(generate(sampling_params, f"{request_id}-again")):
        if _failed(output):
            # The engine does not report that it cannot compile a grammar.
            has_grammar = getattr(sampling_params, "structured_outputs", None) is not None
            grammar = "the grammar could not be compiled, " * has_grammar
            blocks = len(ticket.plan.lengths)
            # vLLM's workers cannot report the cause of a failed request.
            between = (
                f"{len(encoded_again)} of its {blocks} blocks were missing or damaged in the store "
                "and were encoded again"
                if encoded_again
                else f"all its {blocks} blocks were intact in the store, so the workers cannot "
                "read them within load_deadline_s, they use a different store, or the engine fails"
            )
            raise RetryableRequestError(
                f"The request failed twice: {grammar}the blocks of the prompt could not be loaded, "
                f"or the engine failed; in between, {between}; see the server's log"
            )
        _take_report(output, ticket)
        yield output


async def _checked(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the outputs. Raises GrammarError if an output contains a grammar failure."""
    try:
        async for output in outputs:
            report = (output.kv_transfer_params or {}).get(FIELD) or {}
            if GRAMMAR_FAILURE in report:
                raise GrammarError(
                    "The answer cannot be constrained by its grammar: "
                    f"{report[GRAMMAR_FAILURE]}. The grammar is too large or too complex for this "
                    "server; use fewer anyOf cases, tools or optional properties"
                )
            yield output
    finally:
        await outputs.aclose()


def _failed(output: Any) -> bool:
    return any(completion.finish_reason == "error" for completion in output.outputs)


def _take_report(output: Any, ticket: Ticket) -> None:
    """Add the reuse report to the ticket if an output ends an answer.

    The engine sends the report with the last token, unless a stop string ends the answer: vLLM
    detects stop strings in this process, and aborts the engine's request. In that case, the number
    of cached tokens shows that the blocks were used.
    """
    completions, params = output.outputs, output.kv_transfer_params or {}
    if FIELD in params:
        served = ServedBlocks.from_dict(params)
    elif not output.finished or all(c.finish_reason not in _COMPLETE for c in completions):
        return  # More outputs follow, or the answer was aborted.
    elif (
        any(isinstance(completion.stop_reason, str) for completion in completions)
        and (output.num_cached_tokens or 0) >= ticket.plan.context_tokens
    ):
        served = ServedBlocks(len(ticket.plan.lengths), 0, 0, cut_short=True)
    else:
        raise ProtocolError(
            "The engine sent no reuse report; check that its connector is configured"
        )
    CUT_ANSWERS.inc(served.cut_short)
    # Tokens of encoded blocks are already counted as computed.
    recomputed = [
        0 if key in ticket.encoded else tokens
        for key, tokens in zip(ticket.keys, served.recomputed, strict=False)
    ]
    ticket.served = replace(
        served,
        encoded=len(ticket.encoded),
        encoded_tokens=sum(ticket.encoded.values()),
        recomputed=recomputed,
    )
