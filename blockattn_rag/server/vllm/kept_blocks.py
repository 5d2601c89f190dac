"""Private blocks in the workers' memory, which must not be stored.

Importing this module does not load vLLM.
"""

from __future__ import annotations

from collections import OrderedDict

from blockattn_rag.errors import ProtocolError


class KeptBlocks:
    """The API server's estimate of which blocks are in the workers' memory, an LRU cache.

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
        """Raise ProtocolError if a prompt's private blocks exceed ``max_tokens``."""
        if tokens > self.max_tokens:
            raise ProtocolError(
                f"The prompt has {tokens} tokens in private blocks, which must not be stored, but "
                f"this server keeps at most {self.max_tokens} tokens of such blocks in memory; put "
                "other text after the passages, or raise private_memory in the connector's options"
            )
