"""Protocol between client and server: routes, headers, and JSON bodies.

Clients send messages and passages, never token ids or keys: the server tokenizes texts, splits
prompts into blocks and computes store keys. Bodies of completions and chats are those of OpenAI's
API (``server.vllm.bodies``).

Importing this module does not load torch.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, field_validator
from pydantic.dataclasses import dataclass

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.prompts.markers import marker_key
from blockattn_rag.server.validation import (
    STRICT,
    AdapterDigest,
    Count,
    Digest,
    Namespace,
    Positive,
    SinkName,
    check_version,
    parse,
)

INFO = "/blockattn/v1/info"
ENCODE = "/blockattn/v1/encode"

OPENAI = "/blockattn/openai/v1"
"""Path of the base URL for clients of OpenAI's API."""

TENANT_HEADER = "x-tenant-id"
"""HTTP header with a tenant's name. The gateway sets it, and must remove a client's own value."""

PROTOCOL_VERSION = 2
FIELD = "blockattn"
"""Name of this package's field in request and response bodies."""

MOST_BLOCKS = 256

_Name = Annotated[str, Field(min_length=1)]
_KeyId = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Texts = Annotated[tuple[str, ...], Field(min_length=1, max_length=MOST_BLOCKS, fail_fast=True)]

Outcome = Literal["found", "encoded", "missing"]
"""Result for a passage: already stored, stored by this request, or not stored."""


def marker_key_id() -> str:
    """Return the marker key's id. Installations with equal ids accept each other's markers."""
    return hmac.new(marker_key(), b"blockattn-rag key id", hashlib.sha256).hexdigest()[:16]


@dataclass(config=STRICT, frozen=True, slots=True)
class ServerInfo:
    """Server information, returned by ``INFO``.

    Args:
        fingerprint, tokenizer, block_tuned: See ``ModelProfile``.
        sink, adapter, promote, recompute: See ``RecipeOutline``.
        models: Names of the served models, the base model first.
        max_tokens: Maximum number of tokens of a prompt and its answer together.
        has_chat_template: Whether the model supports chats, not only completions.
        marker_key: ``marker_key_id`` of the server.
    """

    fingerprint: Digest
    tokenizer: Digest
    sink: SinkName
    adapter: AdapterDigest
    promote: Count
    recompute: Annotated[float, Field(ge=0, le=1)]
    block_tuned: StrictBool
    models: Annotated[tuple[_Name, ...], Field(min_length=1, max_length=MOST_BLOCKS)]
    max_tokens: Positive
    namespace: Namespace
    read_only: StrictBool
    has_chat_template: StrictBool
    marker_key: _KeyId

    @property
    def recipe(self) -> RecipeOutline:
        return RecipeOutline(self.sink, self.adapter, self.promote, self.recompute)

    def to_dict(self) -> dict[str, Any]:
        return {"v": PROTOCOL_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: object) -> ServerInfo:
        return parse(cls, check_version(value, "v", PROTOCOL_VERSION, "info"), "info")


@dataclass(config=STRICT, frozen=True, slots=True)
class EncodeBody:
    """Body of a request to ``ENCODE``, which stores passages in the prompt format ``CHAT``.

    Args:
        texts: Texts of the passages. White space around them is ignored, as in prompts.
        only_look: Whether to look up passages without encoding them. Passages that are not stored
            are reported as missing.
    """

    texts: _Texts
    only_look: StrictBool = False

    @field_validator("texts")
    @classmethod
    def _have_text(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for place, text in enumerate(texts):
            if not text.strip():
                raise ValueError(f"Text {place} is empty; remove empty passages")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError(f"Text {place} contains a lone surrogate; remove it") from None
        return texts

    @classmethod
    def from_dict(cls, value: object) -> EncodeBody:
        return parse(cls, value, "body")


@dataclass(config=STRICT, frozen=True, slots=True)
class EncodeAnswer:
    """Response of ``ENCODE``: the outcome for each passage."""

    passages: Annotated[tuple[Outcome, ...], Field(min_length=1, max_length=MOST_BLOCKS)]
    encoded_tokens: Count = 0
    stored_bytes: Count = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: object) -> EncodeAnswer:
        return parse(cls, value, "answer")
