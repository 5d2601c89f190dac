"""A request whose blocks were lost gets a second try, before its first token alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import RetryableRequestError

from blockattn_rag.errors import ProtocolError
from blockattn_rag.serving.protocol import ServedBlocks
from blockattn_rag.vllm.retrying import CURRENT, RetryingClient, Ticket
from tests_vllm.engines import sampling_of

MARKER = ServedBlocks(blocks=2, loaded_tokens=9, local_tokens=0).to_dict()
TOKEN = SimpleNamespace(
    outputs=[SimpleNamespace(finish_reason=None)], finished=False, kv_transfer_params=None
)
LOST = SimpleNamespace(
    outputs=[SimpleNamespace(finish_reason="error")], finished=True, kv_transfer_params=None
)


def end(marker: dict[str, Any] | None = MARKER) -> Any:
    return SimpleNamespace(
        outputs=[SimpleNamespace(finish_reason="stop")], finished=True, kv_transfer_params=marker
    )


class Client:
    """An engine client that gives prepared outputs, try by try."""

    def __init__(self, *tries: Sequence[Any]) -> None:
        self.tries = list(tries)
        self.ids: list[str] = []

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
        self.ids.append(request_id)
        for output in self.tries.pop(0):
            yield output


def asked(client: Client, ticket: Ticket | None) -> list[Any]:
    async def ask() -> list[Any]:
        CURRENT.set(ticket)
        outputs = RetryingClient(client).generate([1], sampling_of(None), "r")
        return [output async for output in outputs]

    return asyncio.run(ask())


async def _one_encoded() -> tuple[int, int]:
    return 1, 7


def test_blocks_that_were_lost_are_encoded_and_the_request_asked_anew() -> None:
    client = Client([LOST], [TOKEN, end()])
    ticket = Ticket(_one_encoded)
    said = asked(client, ticket)
    assert client.ids == ["r", "r-again"]
    served = ServedBlocks.from_dict(said[-1].kv_transfer_params)
    assert (served.encoded, served.encoded_tokens) == (1, 7)
    assert ticket.marker == said[-1].kv_transfer_params


def test_there_is_no_third_try() -> None:
    client = Client([LOST], [LOST])
    with pytest.raises(RetryableRequestError, match="could not be loaded"):
        asked(client, Ticket(_one_encoded))
    assert len(client.ids) == 2


def test_once_a_token_was_sent_an_error_is_passed_on() -> None:
    client = Client([TOKEN, LOST])
    assert asked(client, Ticket(_one_encoded))[-1] is LOST
    assert client.ids == ["r"]


def test_an_answer_without_a_word_of_blocks_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="without a word of blocks"):
        asked(Client([end(None)]), Ticket(_one_encoded))


def test_requests_of_full_mode_are_left_alone() -> None:
    client = Client([LOST])
    assert asked(client, None) == [LOST]
