"""What a model is asked to encode."""

from __future__ import annotations

from typing import NamedTuple


class EncodeRequest(NamedTuple):
    """Tokens of one block, and what its KV shall be known by."""

    token_ids: list[int]
    digest: str
    handle: str
