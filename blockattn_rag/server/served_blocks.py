"""Reuse report of an engine, in the ``kv_transfer_params`` of an answer.

Importing this module does not load torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.protocol import FIELD


@dataclass(frozen=True, slots=True)
class ServedBlocks:
    """Counts of the context blocks of a request in block mode that were loaded, cached or encoded.

    Args:
        loaded_tokens: Context tokens loaded from a store, including tokens that are then
            recomputed.
        local_tokens: Context tokens found in the engine's own cache.
        encoded: Blocks encoded for this request, because no store had them.
        encoded_tokens: Tokens of these encoded blocks.
        fetch_s: Seconds to load the blocks.
        int8_blocks: Blocks loaded in int8.
        cut_short: Whether a stop string ended the answer. The engine then reports nothing, so
            ``loaded_tokens``, ``local_tokens``, ``fetch_s`` and ``int8_blocks`` are unknown and 0,
            and ``recomputed`` is empty.
        recomputed: Number of recomputed tokens of each block that was not encoded for this request.
            Empty: no tokens were recomputed.
    """

    blocks: int
    loaded_tokens: int
    local_tokens: int
    encoded: int = 0
    encoded_tokens: int = 0
    fetch_s: float = 0.0
    int8_blocks: int = 0
    cut_short: bool = False
    recomputed: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """``kv_transfer_params`` of the answer."""
        return {FIELD: asdict(self)}

    @classmethod
    def from_dict(cls, kv_transfer_params: Mapping[str, Any]) -> ServedBlocks:
        """Read an answer's ``kv_transfer_params``, ignoring fields of other connectors."""
        return cls(**kv_transfer_params[FIELD])

    def reuse(self, lengths: tuple[int, ...], prompt_tokens: int) -> dict[str, int]:
        """Counts of ``ReuseStats`` for an answer in block mode.

        Args:
            lengths: Tokens of each context block of the prompt.

        Raises:
            ProtocolError: The answer did not use all context blocks.
        """
        expected = sum(lengths)
        tokens = expected if self.cut_short else self.loaded_tokens + self.local_tokens
        if (self.blocks, tokens) != (len(lengths), expected):
            raise ProtocolError(
                f"The engine answered from {self.blocks} blocks of {tokens} tokens, expected "
                f"{len(lengths)} of {expected}"
            )
        reused = expected - self.encoded_tokens - sum(self.recomputed)
        return {
            "hits": self.blocks - self.encoded,
            "misses": self.encoded,
            "reused_tokens": reused,
            "computed_tokens": prompt_tokens - reused,
        }
