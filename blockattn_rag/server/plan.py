"""Plans and reports, which an API server and its engine exchange in ``kv_transfer_params``.

The API server creates the plan of a prompt: its split into blocks, and who may read them. On a
server with tenants, plans are signed with the tenant secret, so that no client can use another
tenant's namespace. The engine answers with a report on the blocks.

Importing this module does not load torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from blockattn_rag.errors import ProtocolError
from blockattn_rag.prompts.blocks import PRIVATE, Keep
from blockattn_rag.server.protocol import FIELD, MOST_BLOCKS, PROTOCOL_VERSION
from blockattn_rag.server.validation import (
    STRICT,
    Count,
    Namespace,
    Positive,
    as_object,
    check_version,
    parse,
    shown,
)

_UNSIGNED = (
    "Only the server's own routes can create plans and choose namespaces: use /blockattn/openai "
    "without kv_transfer_params, and the same tenant secret in all processes of the server"
)


def code(message: str, secret: str) -> str:
    return hmac.new(secret.encode(), message.encode(), hashlib.sha256).hexdigest()


@dataclass(config=STRICT, frozen=True, slots=True)
class BlockPlan:
    """Split of a request's prompt into blocks.

    Args:
        op: ``complete``: generate an answer from blocks. ``encode``: encode and keep one block.
        lengths: Number of tokens of each context block, in order. For ``complete``, the prompt
            starts with the blocks, and at least one token follows. For ``encode``, the only block
            is at the end of the prompt.
        keep: Where each block may be kept. Default: ``PRIVATE`` for all, so that text that a client
            did not mark as a passage is never stored.
        fixed: Indices of blocks, other than the first, that are not passages. Tokens of the first
            block and of these blocks are never recomputed.
        opens_prompt: For ``encode``: whether the block is the first of a prompt, and so is encoded
            without sink and adapter.
    """

    op: Literal["complete", "encode"]
    lengths: Annotated[tuple[Positive, ...], Field(max_length=MOST_BLOCKS, fail_fast=True)]
    namespace: Namespace = ""
    keep: Annotated[
        tuple[Keep, ...], Field(max_length=MOST_BLOCKS, fail_fast=True, validate_default=True)
    ] = ()
    opens_prompt: StrictBool = False
    fixed: Annotated[tuple[Count, ...], Field(max_length=MOST_BLOCKS, fail_fast=True)] = ()

    @field_validator("keep")
    @classmethod
    def _one_keep_per_block(cls, keep: tuple[Keep, ...], info: ValidationInfo) -> tuple[Keep, ...]:
        blocks = len(info.data.get("lengths", keep))
        if len(keep) not in (0, blocks):
            raise ValueError(f"Expected one item per block ({blocks}), found {len(keep)}")
        return keep or (PRIVATE,) * blocks

    @property
    def context_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def may_change(self) -> tuple[bool, ...]:
        """Whether the tokens of each block may be recomputed."""
        fixed = {0, *self.fixed}
        return tuple(place not in fixed for place in range(len(self.lengths)))

    def to_dict(self, secret: str | None = None) -> dict[str, Any]:
        """Convert the plan to ``kv_transfer_params``, signed with the server's tenant secret.
        Without a secret, the plan is unsigned and contains no namespace."""
        fields = {"v": PROTOCOL_VERSION, **dataclasses.asdict(self)}
        if secret is None:
            del fields["namespace"]
        else:
            fields["mac"] = self.signature(secret)
        return {FIELD: fields}

    def signature(self, secret: str) -> str:
        return code(json.dumps([PROTOCOL_VERSION, *dataclasses.asdict(self).values()]), secret)

    def is_signed(self, mac: object, secret: str) -> bool:
        """Whether ``mac``, an untrusted value, is this plan's signature with ``secret``."""
        is_text = isinstance(mac, str) and mac.isascii()
        return is_text and hmac.compare_digest(str(mac), self.signature(secret))


def parse_plan(
    kv_transfer_params: Mapping[str, Any] | None,
    num_prompt_tokens: int,
    *,
    secret: str | None = None,
    namespace: str = "",
) -> BlockPlan | None:
    """Parse the plan in ``kv_transfer_params``, if any. Raises ProtocolError if it is invalid.

    Args:
        secret: The server's tenant secret. If set, plans must be signed with it.
        namespace: Namespace of plans on a server without tenants.
    """
    if kv_transfer_params is None:
        return None
    params = as_object(kv_transfer_params, "kv_transfer_params")
    if FIELD not in params:
        return None
    if others := params.keys() - {FIELD}:
        raise ProtocolError(
            f"kv_transfer_params contains the unknown field {shown(min(others))}; remove it"
        )
    fields = check_version(params[FIELD], "v", PROTOCOL_VERSION, FIELD)
    mac = fields.pop("mac", None)
    if secret is None:
        if mac is not None or "namespace" in fields:
            raise ProtocolError(_UNSIGNED)
        fields["namespace"] = namespace
    plan = parse(BlockPlan, fields, FIELD)
    if secret is not None and not plan.is_signed(mac, secret):
        raise ProtocolError(_UNSIGNED)
    if plan.op == "encode" and len(plan.lengths) != 1:
        raise ProtocolError(
            f"op='encode' takes one block, found {len(plan.lengths)}; send one request per block"
        )
    answers = plan.op != "encode"
    most = num_prompt_tokens - answers
    if plan.context_tokens > most:
        last = ", and its last token must not be in a block" if answers else ""
        raise ProtocolError(
            f"lengths add up to {plan.context_tokens} tokens, expected at most {most}: the prompt "
            f"has {num_prompt_tokens}{last}"
        )
    return plan


@dataclasses.dataclass(frozen=True, slots=True)
class ServedBlocks:
    """Report on a block-mode request: its loaded, cached and encoded context blocks.

    Args:
        loaded_tokens: Context tokens loaded from a store, including tokens that were then
            recomputed.
        local_tokens: Context tokens found in the engine's prefix cache.
        encoded: Number of blocks encoded for this request, because they were not stored.
        fetch_s: Seconds to load the blocks and recompute tokens.
        cut_short: Whether a stop string ended the answer. The engine then sends no report, so
            the numbers of loaded, local and recomputed tokens are unknown.
        recomputed: Number of recomputed tokens in each block; 0 for blocks that were encoded for
            this request. Empty if no tokens were recomputed.
    """

    blocks: int
    loaded_tokens: int
    local_tokens: int
    encoded: int = 0
    encoded_tokens: int = 0
    fetch_s: float = 0.0
    int8_blocks: int = 0
    cut_short: bool = False
    recomputed: list[int] = dataclasses.field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {FIELD: dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, kv_transfer_params: Mapping[str, Any]) -> ServedBlocks:
        return cls(**kv_transfer_params[FIELD])

    def reuse(self, lengths: tuple[int, ...], prompt_tokens: int) -> dict[str, int]:
        """Return ``ReuseStats`` fields for a prompt whose context blocks have these lengths."""
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
