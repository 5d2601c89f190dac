"""How much may be under way at once: who finds no room waits for it, in the order of coming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Room:
    """Room in an event loop.

    Args:
        most: things under way at once, at most.
        max_bytes: what they may take together; a single one may take more.
    """

    def __init__(self, most: int, max_bytes: int) -> None:
        self._most, self._max_bytes = most, max_bytes
        self._things = self._bytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def taken(self, nbytes: int) -> AsyncGenerator[None, None]:
        """Wait for room, and have it while this is open."""
        async with self._turn:
            while not self._has_room(nbytes):
                self._freed.clear()
                await self._freed.wait()
            self._things += 1
            self._bytes += nbytes
        try:
            yield
        finally:
            self._things -= 1
            self._bytes -= nbytes
            self._freed.set()

    def _has_room(self, nbytes: int) -> bool:
        is_within = self._things < self._most and self._bytes + nbytes <= self._max_bytes
        return not self._things or is_within
