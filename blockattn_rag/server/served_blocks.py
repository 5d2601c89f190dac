"""Report on the context blocks of an answer, in its ``kv_transfer_params``.

Importing this module does not load torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.protocol import FIELD, PROTOCOL_VERSION
from blockattn_rag.server.validation import STRICT, Count, check_version, parse, shown


@dataclass(config=STRICT, frozen=True, slots=True)
class ServedBlocks:
    """Report on the context blocks of a request in block mode: loaded, cached or encoded.

    Args:
        blocks: Number of context blocks.
        loaded_tokens: Context tokens loaded from a store.
        local_tokens: Context tokens found in the engine's own cache.
        encoded: Blocks encoded for this request, because no store had them.
        encoded_tokens: Tokens of these encoded blocks.
        fetch_s: Seconds to load the blocks.
        int8_blocks: Blocks loaded in int8.
        cut_short: Whether a stop string ended the answer. The engine then reports nothing, so
            ``loaded_tokens``, ``local_tokens``, ``fetch_s`` and ``int8_blocks`` are unknown and 0.
    """

    blocks: Count
    loaded_tokens: Count
    local_tokens: Count
    encoded: Count = 0
    encoded_tokens: Count = 0
    fetch_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0
    int8_blocks: Count = 0
    cut_short: StrictBool = False

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.cut_short and (
            self.loaded_tokens or self.local_tokens or self.fetch_s or self.int8_blocks
        ):
            raise ValueError(
                "found cut_short and counts that it makes unknown: loaded_tokens, local_tokens, "
                "fetch_s and int8_blocks must be 0"
            )
        if self.encoded_tokens < self.encoded or (self.encoded_tokens and not self.encoded):
            raise ValueError(
                f"found {self.encoded} encoded blocks of {self.encoded_tokens} tokens together, "
                "which disagree"
            )
        return self

    def check_complete(self, lengths: tuple[int, ...]) -> None:
        """Check that an answer used all context blocks of a prompt, which have these lengths."""
        expected = sum(lengths)
        tokens = expected if self.cut_short else self.loaded_tokens + self.local_tokens
        if (self.blocks, tokens) != (len(lengths), expected):
            raise ProtocolError(
                f"The server answered from {self.blocks} blocks of {tokens} tokens, expected "
                f"{len(lengths)} of {expected}"
            )
        if self.encoded > self.blocks or self.encoded_tokens > tokens:
            raise ProtocolError(
                f"The server reports {self.encoded} of {self.blocks} blocks as encoded, and "
                f"{self.encoded_tokens} of {tokens} tokens"
            )

    def to_dict(self) -> dict[str, Any]:
        """``kv_transfer_params`` of the answer."""
        return {FIELD: {"v": PROTOCOL_VERSION, "mode": "block", **asdict(self)}}

    @classmethod
    def from_dict(cls, kv_transfer_params: Mapping[str, Any] | None) -> ServedBlocks:
        """Parse an answer's ``kv_transfer_params``, ignoring fields of other connectors."""
        params = kv_transfer_params
        if not isinstance(params, Mapping) or FIELD not in params:
            raise ProtocolError(
                f"Found kv_transfer_params {shown(params)} in the server's answer, expected the "
                f"field {FIELD!r}: it was not computed in block mode. Configure this package's "
                "connector on the server"
            )
        fields = check_version(params[FIELD], "v", PROTOCOL_VERSION, FIELD)
        if (mode := fields.pop("mode", None)) != "block":
            raise ProtocolError(f"Found mode {shown(mode)} in {FIELD}, expected 'block'")
        return parse(cls, fields, FIELD)


def reuse_of(served: ServedBlocks, lengths: tuple[int, ...], prompt_tokens: int) -> dict[str, int]:
    """Counts of ``ReuseStats`` for an answer in block mode.

    Args:
        lengths: Tokens of each context block of the prompt.
        prompt_tokens: Tokens of the prompt.
    """
    served.check_complete(lengths)
    reused = sum(lengths) - served.encoded_tokens
    return {
        "hits": served.blocks - served.encoded,
        "misses": served.encoded,
        "reused_tokens": reused,
        "computed_tokens": prompt_tokens - reused,
    }
