"""vLLM's engine client, asked once more where the blocks of a prompt were lost in between."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.exceptions import RetryableRequestError

from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.protocol import FIELD, BlockPlan, ServedBlocks
from blockattn_rag.server.vllm import grammars
from blockattn_rag.server.vllm.counts import CUT_ANSWERS, RETRIES


@dataclass(slots=True)
class Ticket:
    """A request in block mode on its way through vLLM's handlers.

    Args:
        plan: how its prompt is cut.
        ensure_again: have all its blocks stored, looking at each closely; returns what is added to
            ``encoded``.
        encoded: tokens of each block that was encoded for it, by key: once, however often.
        marker: what its answer says of its blocks, as soon as that is known.
    """

    plan: BlockPlan
    ensure_again: Callable[[], Awaitable[Mapping[str, int]]]
    encoded: Mapping[str, int] = field(default_factory=dict)
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
        """As vLLM's; the last output of a request in block mode says what was encoded for it.

        Raises:
            GrammarError: (from the generator) the grammar of the answer failed.
        """
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
        anew = await ticket.ensure_again()
        ticket.encoded = {**ticket.encoded, **anew}
        again = self._client.generate(prompt, sampling_params, f"{request_id}-again", **options)
        async for output in _checked(again):
            if _failed(output):
                # The engine gives no reason if it cannot compile a grammar that the server accepts.
                has_grammar = getattr(sampling_params, "structured_outputs", None) is not None
                grammar = "the grammar could not be compiled, " * has_grammar
                raise RetryableRequestError(
                    f"{grammar}the blocks of the prompt could not be loaded, or the engine failed, "
                    "twice; "
                    f"{_between(len(anew), ticket.plan)}; the server's log says why"
                )
            yield _marked(output, ticket)


async def _checked(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Outputs until the engine reports that the grammar of the answer failed."""
    try:
        async for output in outputs:
            grammars.check_output(output)
            yield output
    finally:
        await outputs.aclose()


_WHOLE = ("stop", "length", "repetition")


def _failed(output: Any) -> bool:
    return any(one.finish_reason == "error" for one in output.outputs)


def _between(anew: int, plan: BlockPlan) -> str:
    """What the look at the blocks between two tries that failed tells of why they did. vLLM's
    workers, which know, have no way to tell whom a request came from."""
    blocks = len(plan.lengths)
    if anew:
        return (
            f"in between, {anew} of its {blocks} blocks were not whole in the store, and were "
            "encoded anew"
        )
    return (
        f"in between, all its {blocks} blocks were whole in the store: the workers do not read "
        "them within load_deadline_s, or not from that store, or the engine fails"
    )


def _marked(output: Any, ticket: Ticket) -> Any:
    """An output that also tells, where it ends an answer, what became of the prompt's blocks."""
    served = _served(output, ticket.plan)
    if served is not None:
        CUT_ANSWERS.inc(served.cut_short)
        ticket.marker = replace(
            served, encoded=len(ticket.encoded), encoded_tokens=sum(ticket.encoded.values())
        ).to_dict()
        output.kv_transfer_params = ticket.marker
    return output


def _served(output: Any, plan: BlockPlan) -> ServedBlocks | None:
    """What an output says of blocks; None if more outputs follow, or the answer was broken off.

    The engine says it with the last token. It does not where a stop string ends the answer: vLLM
    finds these where it makes text, in this process, and then breaks the engine's request off. Its
    tokens that were not computed tell then that the blocks were there.
    """
    if output.kv_transfer_params and FIELD in output.kv_transfer_params:
        return ServedBlocks.from_dict(output.kv_transfer_params)
    if not (output.finished and any(one.finish_reason in _WHOLE for one in output.outputs)):
        return None
    is_stopped_here = any(isinstance(one.stop_reason, str) for one in output.outputs)
    if is_stopped_here and (output.num_cached_tokens or 0) >= plan.context_tokens:
        return ServedBlocks(len(plan.lengths), 0, 0, cut_short=True)
    raise ProtocolError("the engine answered without a word of blocks: is the connector there?")
