"""An engine's reuse report, in the ``kv_transfer_params`` of an answer.

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
    """Counts of loaded, cached and encoded context blocks of a block-mode request.

    Args:
        loaded_tokens: Context tokens loaded from a store, including tokens that were then
            recomputed.
        local_tokens: Context tokens found in the engine's own cache.
        encoded: Blocks encoded for this request, because they were not stored.
        encoded_tokens: Number of tokens in these blocks.
        fetch_s: Load time of the blocks in seconds.
        int8_blocks: Number of blocks loaded in int8.
        cut_short: Whether a stop string ended the answer. The engine then sends no report, so
            ``loaded_tokens``, ``local_tokens``, ``fetch_s`` and ``int8_blocks`` are unknown and set
            to 0, and ``recomputed`` is empty.
        recomputed: Number of recomputed tokens in each block that was not encoded for this request.
            Empty if no tokens were recomputed.
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
        """Convert the report to an answer's ``kv_transfer_params``."""
        return {FIELD: asdict(self)}

    @classmethod
    def from_dict(cls, kv_transfer_params: Mapping[str, Any]) -> ServedBlocks:
        """Parse an answer's ``kv_transfer_params``, ignoring fields of other connectors."""
        return cls(**kv_transfer_params[FIELD])

    def reuse(self, lengths: tuple[int, ...], prompt_tokens: int) -> dict[str, int]:
        """Return the fields of ``ReuseStats`` for a block-mode answer.

        Args:
            lengths: Number of tokens of each context block in the prompt.

        Raises:
            ProtocolError: The answer did not use all context blocks.
        """
        expected = sum(lengths)
        tokens = expected if self.cut_short else self.loaded_tokens + self.local_tokens
        if (self.blocks, tokens) != (len(lengths), expected):
            raise ProtocolError(
                f"The engine used {self.blocks} blocks with {tokens} tokens, expected "
                f"{len(lengths)} blocks with {expected} tokens"
            )
        reused = expected - self.encoded_tokens - sum(self.recomputed)
        return {
            "hits": self.blocks - self.encoded,
            "misses": self.encoded,
            "reused_tokens": reused,
            "computed_tokens": prompt_tokens - reused,
        }
