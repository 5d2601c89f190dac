"""Retries of requests whose blocks were lost, and reuse reports for all answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.exceptions import RetryableRequestError

from blockattn_rag.errors import GrammarError, ProtocolError
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.protocol import FIELD
from blockattn_rag.server.served_blocks import ServedBlocks
from blockattn_rag.server.vllm.chat_report import ENDS, edited_events
from blockattn_rag.server.vllm.metrics import CUT_ANSWERS, RETRIES
from blockattn_rag.server.vllm.scheduler import GRAMMAR_FAILURE

_COMPLETE = ("stop", "length", "repetition")


@dataclass(slots=True)
class Ticket:
    """State of a block-mode request while vLLM's handlers process it.

    Args:
        ensure_again: Function that checks all blocks of the prompt thoroughly, encodes missing
            ones, and returns the number of tokens of each encoded block by key.
        keys: Keys of the context blocks, in order.
        marker: ``kv_transfer_params`` of the answer, or None until they are known.
    """

    plan: BlockPlan
    ensure_again: Callable[[], Awaitable[Mapping[str, int]]]
    encoded: Mapping[str, int] = field(default_factory=dict)
    keys: Sequence[str] = ()
    marker: dict[str, Any] | None = None


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
        """Like vLLM's ``generate``. In block mode, the last output contains a reuse report."""
        ticket = CURRENT.get()
        if ticket is None:
            return _checked(self._client.generate(prompt, sampling_params, request_id, **options))
        return self._generate(ticket, prompt, sampling_params, request_id, options)

    async def _generate(
        self,
        ticket: Ticket,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[Any, None]:
        copied = sampling_params.clone()
        first = _checked(self._client.generate(prompt, copied, request_id, **options))
        begun = False
        async for output in first:
            if _failed(output) and not begun:
                break
            begun = True
            yield _marked(output, ticket)
        else:
            return
        await first.aclose()
        RETRIES.inc()
        encoded_again = await ticket.ensure_again()
        ticket.encoded = {**ticket.encoded, **encoded_again}
        again = self._client.generate(prompt, sampling_params, f"{request_id}-again", **options)
        async for output in _checked(again):
            if _failed(output):
                # The engine does not report that it cannot compile a grammar.
                has_grammar = getattr(sampling_params, "structured_outputs", None) is not None
                grammar = "the grammar could not be compiled, " * has_grammar
                raise RetryableRequestError(
                    f"{grammar}the blocks of the prompt could not be loaded, or the engine failed, "
                    f"twice; {_between(len(encoded_again), ticket.plan)}; see the server's log"
                )
            yield _marked(output, ticket)


async def _checked(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    try:
        async for output in outputs:
            _check_grammar(output)
            yield output
    finally:
        await outputs.aclose()


def _check_grammar(output: Any) -> None:
    """Raise GrammarError if an output contains a grammar failure."""
    params = output.kv_transfer_params
    ours = params.get(FIELD) if isinstance(params, Mapping) else None
    if isinstance(ours, Mapping) and GRAMMAR_FAILURE in ours:
        why = ours[GRAMMAR_FAILURE]
        raise GrammarError(
            f"The answer cannot be constrained by its grammar: {why}. The grammar is too large or "
            "too complex for this server; use fewer anyOf cases, tools or optional properties"
        )


def _failed(output: Any) -> bool:
    return any(completion.finish_reason == "error" for completion in output.outputs)


def _between(num_encoded: int, plan: BlockPlan) -> str:
    """Describe the check between two failed attempts. vLLM's workers cannot report the cause of a
    failed request."""
    blocks = len(plan.lengths)
    if num_encoded:
        return (
            f"in between, {num_encoded} of its {blocks} blocks were missing or damaged in the "
            "store and were encoded again"
        )
    return (
        f"in between, all its {blocks} blocks were intact in the store: the workers cannot read "
        "them within load_deadline_s or use another store, or the engine fails"
    )


def _marked(output: Any, ticket: Ticket) -> Any:
    """Add the reuse report to an output that ends an answer."""
    served = _served(output, ticket.plan)
    if served is not None:
        CUT_ANSWERS.inc(served.cut_short)
        # Tokens of encoded blocks are already counted as computed.
        recomputed = [
            0 if key in ticket.encoded else tokens
            for key, tokens in zip(ticket.keys, served.recomputed, strict=False)
        ]
        ticket.marker = replace(
            served,
            encoded=len(ticket.encoded),
            encoded_tokens=sum(ticket.encoded.values()),
            recomputed=recomputed,
        ).to_dict()
        output.kv_transfer_params = ticket.marker
    return output


def _served(output: Any, plan: BlockPlan) -> ServedBlocks | None:
    """Build the reuse report. None if more outputs follow, or the answer was aborted.

    The engine sends the report with the last token, unless a stop string ends the answer: vLLM
    detects stop strings in this process, and aborts the engine's request. In that case, the number
    of cached tokens shows that the blocks were used.
    """
    if output.kv_transfer_params and FIELD in output.kv_transfer_params:
        return ServedBlocks.from_dict(output.kv_transfer_params)
    if not (
        output.finished
        and any(completion.finish_reason in _COMPLETE for completion in output.outputs)
    ):
        return None
    is_stopped_here = any(isinstance(completion.stop_reason, str) for completion in output.outputs)
    if is_stopped_here and (output.num_cached_tokens or 0) >= plan.context_tokens:
        return ServedBlocks(len(plan.lengths), 0, 0, cut_short=True)
    raise ProtocolError("The engine sent no reuse report; check that its connector is configured")


def with_marker(events: AsyncGenerator[str, None], ticket: Ticket) -> AsyncGenerator[str, None]:
    """Add ``kv_transfer_params`` to the events that end an answer.

    vLLM 0.32 adds them only to non-streaming answers, and later releases also to streams.
    """

    def add(data: dict[str, Any]) -> None:
        if ticket.marker:
            data["kv_transfer_params"] = ticket.marker

    return edited_events(events, add, (ENDS,))
