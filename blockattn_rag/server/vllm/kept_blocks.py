"""Blocks that the workers keep in memory because they must not be stored.

Importing this module does not load vLLM.
"""

from __future__ import annotations

from collections import OrderedDict

from blockattn_rag.errors import ProtocolError


class KeptBlocks:
    """The API server's estimate of the blocks in the workers' memory, which is an LRU cache.

    The estimate can be wrong if other API servers use the same workers. In that case, a load fails
    and the block is encoded again.
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
        """Raise ProtocolError if a prompt needs more than ``max_tokens`` tokens in memory."""
        if tokens > self.max_tokens:
            raise ProtocolError(
                f"The prompt has blocks of {tokens} tokens that must not be stored, but this "
                f"server keeps at most {self.max_tokens} such tokens in memory; put other text "
                "after the passages, or raise private_memory in the connector's options"
            )
