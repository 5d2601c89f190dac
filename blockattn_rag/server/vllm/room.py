"""What there is room for: blocks in the workers' memory, and encodings that run at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from blockattn_rag.errors import ProtocolError


class KeptBlocks:
    """The API server's estimate of which blocks the workers have in memory: an LRU, as theirs is.

    It can be wrong if other API servers use the same workers. Then a load fails, and the block is
    encoded again.

    Args:
        max_tokens: Tokens that the workers keep.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._sum = 0

    def use(self, key: str) -> bool:
        """Whether a block should be in memory. Marks it as used."""
        if key in self._tokens:
            self._tokens.move_to_end(key)
        return key in self._tokens

    def add(self, key: str, tokens: int) -> None:
        self.discard(key)
        self._tokens[key] = tokens
        self._sum += tokens
        while self._sum > self.max_tokens:
            self.discard(next(iter(self._tokens)))

    def discard(self, key: str) -> None:
        self._sum -= self._tokens.pop(key, 0)

    def check_room(self, tokens: int) -> None:
        """Check that a prompt with so many tokens in memory fits. Raises ProtocolError."""
        if tokens > self.max_tokens:
            raise ProtocolError(
                f"the prompt has blocks of {tokens} tokens that may not be stored, but this server "
                f"keeps at most {self.max_tokens} such tokens in memory; put text that is no "
                "passage after the passages, or raise private_memory in the connector's options"
            )


class Room:
    """Limits what runs at once in an event loop. Waiters are served first come, first served.

    Args:
        max_running: Tasks that run at once.
        max_bytes: Bytes that they take together; a single task may take more.
    """

    def __init__(self, max_running: int, max_bytes: int) -> None:
        self._max_running, self._max_bytes = max_running, max_bytes
        self._running = self._bytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def taken(self, nbytes: int) -> AsyncGenerator[None, None]:
        """Wait for room, and occupy it inside the context."""
        async with self._turn:
            while self._running and (
                self._running >= self._max_running or self._bytes + nbytes > self._max_bytes
            ):
                self._freed.clear()
                await self._freed.wait()
            self._running += 1
            self._bytes += nbytes
        try:
            yield
        finally:
            self._running -= 1
            self._bytes -= nbytes
            self._freed.set()
