"""Which blocks the engine's workers have in their memory, as far as the API server can know."""

from __future__ import annotations

from collections import OrderedDict

from blockattn_rag.errors import ProtocolError


class KeptBlocks:
    """What was encoded and may not be stored, the most recently used of it.

    Workers drop what was not used for the longest time, and so does this: it says what they should
    have. Where it is wrong, because requests came to them in another order or by another API
    server, a load fails, and the block is encoded once more.

    Args:
        most_tokens: that the workers keep.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._sum = 0

    def use(self, key: str) -> bool:
        """Whether a block should be there; it counts as used now."""
        if key in self._tokens:
            self._tokens.move_to_end(key)
        return key in self._tokens

    def add(self, key: str, tokens: int) -> None:
        """A block was encoded."""
        self.forget(key)
        self._tokens[key] = tokens
        self._sum += tokens
        while self._sum > self.most_tokens:
            self.forget(next(iter(self._tokens)))

    def forget(self, key: str) -> None:
        """A block is not there any more."""
        self._sum -= self._tokens.pop(key, 0)

    def check_room(self, tokens: int) -> None:
        """Refuse a prompt of which so many tokens must be in memory at once.

        Raises:
            ProtocolError: there is no room for them; says what to do.
        """
        if tokens > self.most_tokens:
            raise ProtocolError(
                f"blocks of {tokens} tokens may not be stored, and this server keeps at most "
                f"{self.most_tokens} such tokens in memory; put what is no passage after the "
                "passages, or raise private_memory in the connector's options"
            )
