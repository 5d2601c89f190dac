"""Validation of request bodies: size and JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.validation import read_json


def read(*chunks: bytes, max_tokens: int = 1) -> Any:
    async def sent() -> AsyncGenerator[bytes, None]:
        for chunk in chunks:
            yield chunk
        assert chunk != b"unread"

    return asyncio.run(read_json(sent(), max_tokens))


@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_size_limit_grows_with_the_context_window(max_tokens: int) -> None:
    most = (4 << 20) + 64 * max_tokens
    body = b'"' + b"x" * (most - 2) + b'"'
    assert len(read(body[:9], body[9:], max_tokens=max_tokens)) == most - 2
    with pytest.raises(ProtocolError, match=f"larger than {most:,} bytes"):
        read(body, b" ", b"unread", max_tokens=max_tokens)


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff", b"1" * 5000])
def test_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="The body is not valid JSON: "):
        read(body)
