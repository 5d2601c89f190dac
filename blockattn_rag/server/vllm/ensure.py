"""Looks up a prompt's blocks, and requests the encoding of missing blocks from the engine."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from vllm import SamplingParams

from blockattn_rag.errors import MissError, ProtocolError, ServingError, StoreError
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.keys import BlockId
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.shares import Share
from blockattn_rag.server.vllm.saver import QUEUE_BYTES
from blockattn_rag.server.vllm.scheduler import UNSAVED, new_encode_name
from blockattn_rag.store.base import KVStore, find_blocks, is_damage
from blockattn_rag.store.concurrency import CircuitBreaker

logger = logging.getLogger("blockattn_rag")

_AT_ONCE = 64  # Further blocks wait outside the engine, so that they occupy no pages.
_ANSWERED_WITHIN_S = 30.0
_STORED_WITHIN_S = 60.0
_FAILURES, _PAUSE_S = 3, 30.0
_THREADS = 16

_REPORTED_TOKENS = 2
"""Tokens to generate when querying the workers' reports. Reports arrive at the end of the first
token's step. The second token adds the step that returns them, which an idle engine would skip."""

_FIRST_ASKED_S, _ASKED_EVERY_S = 0.1, 0.5
"""Seconds until the engine is first asked why a block is not stored, and between queries."""


class NotStoredError(ServingError):
    """A block could not be stored. Workers can keep it in memory instead."""


class _Flight:
    """Running encoding of a block. ``is_asked``: Whether its request was sent to the engine."""

    def __init__(self, encode: Callable[[_Flight], Coroutine[Any, Any, None]]) -> None:
        self.waiting = 0
        self.is_asked = False
        self.task = asyncio.create_task(encode(self))


class BlockEnsurer:
    """Looks up blocks in the store, and encodes missing blocks with the engine. A block that
    concurrent requests need is encoded only once."""

    def __init__(
        self, engine_client: Any, home: KVStore, config: ServingConfig, profile: ModelProfile
    ) -> None:
        self._engine_client = engine_client
        self._secret = config.tenant_secret
        self._home = home
        self._config = config
        self._profile = profile
        self._outline = Share.of(profile).token_outline(profile)
        self._kept = KeptBlocks(config.private_tokens(profile))
        self._later: set[asyncio.Task[None]] = set()
        self._flights: dict[tuple[str, bool], _Flight] = {}
        # Workers drop blocks if they encode faster than they store, so blocks wait here.
        self._room = Room(_AT_ONCE, QUEUE_BYTES)
        # A store that rejects all blocks would delay every request and waste computation.
        self._storing = CircuitBreaker(_FAILURES, _PAUSE_S)
        self._why_unstored = ""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="blockattn-rag-ensure")

    async def found(self, blocks: Sequence[BlockId], *, thorough: bool = False) -> list[bool]:
        """Check whether each block is available, and mark available blocks as used.

        If ``thorough``, complete entries are read, damaged entries in a block's own namespace are
        deleted (unless ``read_only``), and blocks in the workers' memory are assumed to be lost.
        """
        distinct = {block.name: block for block in blocks}
        looks = (self._is_found(block, thorough) for block in distinct.values())
        there = dict(zip(distinct, await asyncio.gather(*looks), strict=True))
        return [there[block.name] for block in blocks]

    async def _is_found(self, block: BlockId, thorough: bool) -> bool:
        if not block.keep.is_stored and thorough:
            self._kept.discard(block.key)
        if not block.keep.is_stored and self._kept.use(block.key):
            return True
        return await self._asked(self._is_sound if thorough else self._is_there, block)

    async def ensure(
        self, blocks: Sequence[BlockId], *, thorough: bool = False, must_store: bool = False
    ) -> dict[str, int]:
        """Encode missing blocks. Returns the number of tokens of each encoded block, by key.

        A block that cannot be stored is kept in the workers' memory, so that requests succeed even
        if the store is full. Without room, or with ``must_store``, NotStoredError is raised.
        """
        pairs = zip(blocks, await self.found(blocks, thorough=thorough), strict=True)
        absent = {block.name: block for block, is_found in pairs if not is_found}
        late = [block for block in absent.values() if not thorough and self._kept.use(block.key)]
        missing = {name: block for name, block in absent.items() if block not in late}
        unstored = sum(block.keep.is_stored for block in missing.values())
        if unstored and self._config.read_only:
            raise MissError(
                f"{unstored} of {len(blocks)} blocks are not stored, and this server is read_only; "
                "encode them on a server with write access"
            )
        in_memory = {
            block.key: block.tokens
            for block in blocks
            if not block.keep.is_stored and (block.name in missing or self._kept.use(block.key))
        }
        self._kept.check_room(sum(in_memory.values()))
        failures = await asyncio.gather(*(self._unstored(block) for block in missing.values()))
        failed = [block for block, why in zip(missing.values(), failures, strict=True) if why]
        in_memory |= {block.key: block.tokens for block in [*failed, *late]}
        if failed and (must_store or sum(in_memory.values()) > self._kept.max_tokens):
            raise next(filter(None, failures))
        unstorable = [b._replace(keep=b.keep._replace(is_stored=False)) for b in failed]
        await asyncio.gather(*map(self._encoded, unstorable))
        self._store_later(late)
        return {block.key: block.tokens for block in missing.values()}

    async def _unstored(self, block: BlockId) -> NotStoredError | None:
        try:
            await self._encoded(block)
        except NotStoredError as error:
            return error
        return None

    def _store_later(self, blocks: Iterable[BlockId]) -> None:
        """Encode and store, in the background, blocks that are only in the workers' memory."""
        for block in blocks if not self._config.read_only else ():
            task = asyncio.create_task(self._encoded(block))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # see `_land`

    async def _encoded(self, block: BlockId) -> None:
        """Encode a block, or wait if it is already being encoded. The encoding is canceled if all
        waiters are canceled before its request is sent to the engine."""
        flight = self._flights.get(block.name)
        if flight is None:
            flight = self._flights[block.name] = _Flight(partial(self._encode, block))
            flight.task.add_done_callback(lambda _: self._land(block.name, flight))
        flight.waiting += 1
        try:
            await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.is_asked:
                # Remove the encoding immediately, so that no request joins it.
                self._forget(block.name, flight)
                flight.task.cancel()

    def _land(self, name: tuple[str, bool], flight: _Flight) -> None:
        self._forget(name, flight)
        # Logged here, because all waiters may have left. While the breaker is open, nothing is
        # logged, because each request would log the same message.
        if flight.is_asked and not flight.task.cancelled() and (error := flight.task.exception()):
            logger.warning("An encoding request failed: %s", error)

    def _forget(self, name: tuple[str, bool], flight: _Flight) -> None:
        if self._flights.get(name) is flight:
            del self._flights[name]

    async def _encode(self, block: BlockId, flight: _Flight) -> None:
        request_id = new_encode_name()
        async with self._room.taken(block.tokens * self._profile.bytes_per_token):
            if block.keep.is_stored and not self._storing.allows():
                raise NotStoredError(
                    f"Several blocks in a row could not be stored ({self._why_unstored}); the next "
                    f"attempt is within {_PAUSE_S:g} s"
                )
            flight.is_asked = True
            await self._run_encoding(block, request_id)
            if block.keep.is_stored:
                await self._stored(block, request_id)
            else:  # Workers execute this save before later loads.
                self._kept.add(block.key, block.tokens)

    async def _stored(self, block: BlockId, request_id: str) -> None:
        """Wait until the workers have stored an encoded block, or raise NotStoredError."""
        pause, began = 0.005, time.monotonic()
        asking = asyncio.create_task(self._why_not_stored(request_id))
        try:
            while not await self._asked(lambda block: block.key in self._home, block):
                if asking.done() or time.monotonic() > began + _STORED_WITHIN_S:
                    why = f"not stored within {_STORED_WITHIN_S:g} s; see the server's log"
                    if asking.done():
                        why = f"not stored: {asking.result()}"
                    self._why_unstored = why
                    self._storing.failed()
                    raise NotStoredError(
                        f"A block of {len(block.ids)} tokens was encoded but {why} "
                        f"(request {request_id})"
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.2)
        finally:
            asking.cancel()
        self._storing.succeeded()

    async def _run_encoding(self, block: BlockId, request_id: str) -> None:
        reason, (token_ids, plan) = None, block.to_encode(self._profile)
        params = plan.to_dict(self._secret)
        async for output in self._generate(token_ids, params, request_id, 1):
            reason = output.outputs[0].finish_reason
        if reason not in ("length", "stop"):
            raise ServingError(
                f"A block of {block.tokens} tokens was not encoded (request {request_id}, finish "
                f"reason {reason!r}); see the server's log"
            )

    async def _why_not_stored(self, request_id: str) -> str:
        """Query the engine until it returns why an encoding request's block could not be stored."""
        pause = _FIRST_ASKED_S
        while True:
            await asyncio.sleep(pause)
            name = f"blockattn-unsaved-{uuid.uuid4().hex}"
            asked = self._generate([0], {UNSAVED: request_id}, name, _REPORTED_TOKENS)
            async for output in asked:
                if why := (output.kv_transfer_params or {}).get(UNSAVED):
                    return str(why)
            pause = _ASKED_EVERY_S

    def _generate(
        self, token_ids: list[int], params: dict[str, Any], request_id: str, tokens: int
    ) -> AsyncGenerator[Any, None]:
        """Generate exactly ``tokens`` tokens, without decoding them."""
        sampling = SamplingParams(
            max_tokens=tokens,
            min_tokens=0 if tokens == 1 else tokens,
            temperature=0.0,
            detokenize=False,
            extra_args={"kv_transfer_params": params},
        )
        prompt = {"prompt_token_ids": token_ids}
        outputs: AsyncGenerator[Any, None]
        outputs = self._engine_client.generate(prompt, sampling, request_id)
        return outputs

    async def _asked(self, look: Callable[[BlockId], bool], block: BlockId) -> bool:
        """Look up a block in the store without blocking the event loop."""
        asked = asyncio.get_running_loop().run_in_executor(self._threads, look, block)
        try:
            return await asyncio.wait_for(asked, _ANSWERED_WITHIN_S)
        except TimeoutError:
            logger.warning("No response within %g s from %r", _ANSWERED_WITHIN_S, self._home)
            raise StoreError(
                f"The server's store did not respond within {_ANSWERED_WITHIN_S:g} s"
            ) from None
        except StoreError as error:
            logger.warning("A lookup in the store failed: %s", error)
            raise type(error)("The server's store failed; see the server's log") from None

    def _is_there(self, block: BlockId) -> bool:
        return any(self._home.touch(key) for key in block.keys)

    def _is_sound(self, block: BlockId) -> bool:
        (kv,), errors = find_blocks([block], self._home.get_many, self._outline)
        for key, error in errors.items():
            if not is_damage(error):
                if kv is None:
                    raise error
            elif key == block.key and not self._config.read_only:
                self._home.delete(key)
        return kv is not None


class KeptBlocks:
    """The API server's estimate of which blocks are in the workers' memory, with LRU eviction.

    The estimate may be wrong if other API servers use the same workers. In that case, loading
    fails, and the block is encoded again.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._sum = 0

    def use(self, key: str) -> bool:
        """Return whether a block should be in memory, and mark it as used."""
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
        if tokens > self.max_tokens:
            raise ProtocolError(
                f"The prompt has {tokens} tokens in blocks that may not be stored, but this server "
                f"keeps at most {self.max_tokens} tokens of such blocks in memory; put other text "
                "after the passages, or raise private_memory in the connector's options"
            )


class Room:
    """Limit for the number and the total bytes of concurrent tasks in an event loop. Waiting tasks
    start in order. A single task may exceed the byte limit."""

    def __init__(self, max_running: int, max_bytes: int) -> None:
        self._max_running, self._max_bytes = max_running, max_bytes
        self._running = self._bytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def taken(self, nbytes: int) -> AsyncGenerator[None, None]:
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
