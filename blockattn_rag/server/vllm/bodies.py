"""Reads the JSON bodies of requests, up to a size that no prompt exceeds.

Importing this module does not load vLLM.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable
from typing import Any

from blockattn_rag.errors import ProtocolError

_OTHER_BYTES = 4 << 20  # grammars have up to 2 million characters
_BYTES_PER_TOKEN = 64


async def read_json(chunks: AsyncIterable[bytes], max_tokens: int) -> Any:
    """Read and parse a body, without blocking the event loop.

    Args:
        chunks: Parts of the body.
        max_tokens: Maximum tokens of a prompt.

    Raises:
        ProtocolError: The body is not JSON, or has more than 4 MiB and 64 bytes per token.
    """
    most, body = _OTHER_BYTES + _BYTES_PER_TOKEN * max_tokens, bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > most:
            raise ProtocolError(
                f"the body has more than {most:,} bytes, the limit for {max_tokens:,} tokens "
                "(max_model_len); send fewer or shorter texts or blocks, and media by URL"
            )
    try:
        return await asyncio.to_thread(json.loads, body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the body is not valid JSON: {error}") from error
