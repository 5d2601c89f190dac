"""Protocol between client and server: how a prompt is cut, and what became of its blocks.

A client sends token ids, the length of each context block, and where each may be kept. It sends no
keys or digests: the server computes keys from the token ids, so a client reaches only the keys and
values of tokens that it has itself.

Importing this module does not load torch.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from blockattn_rag.errors import ProtocolError
from blockattn_rag.prompts.blocks import Keep, is_private
from blockattn_rag.server.fields import (
    namespace_name,
    one_of,
    real,
    record,
    sequence,
    shown,
    text,
    whole,
)
from blockattn_rag.store.namespaces import Access

if TYPE_CHECKING:
    from blockattn_rag.server.profile import ModelProfile

VERSION = 1
FIELD = "blockattn"
"""This package's field of ``kv_transfer_params``, in requests and in answers."""

MOST_BLOCKS = 256

Op = Literal["complete", "encode"]
"""``complete``: answer from blocks. ``encode``: compute and keep the KV of one block."""

_OPS: tuple[Op, ...] = ("complete", "encode")
_SALT = re.compile(r"ba1-[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How the prompt of a request is cut.

    Args:
        op: Operation.
        lengths: Tokens of each context block, in order. ``complete``: the blocks start the prompt,
            and at least one token follows. ``encode``: one block that ends the prompt.
        namespace: Namespace of the blocks, see ``store.namespaces``.
        keep: Where each block may be kept; ``()`` if all may be stored.

    Raises:
        ProtocolError: A field is invalid.
    """

    op: Op
    lengths: tuple[int, ...]
    namespace: str = ""
    keep: tuple[Keep, ...] = ()

    def __post_init__(self) -> None:
        one_of(self.op, "op", _OPS)
        lengths = sequence(self.lengths, "lengths", 1, MOST_BLOCKS)
        checked = tuple(whole(n, f"lengths[{place}]", 1) for place, n in enumerate(lengths))
        object.__setattr__(self, "lengths", checked)
        if self.op == "encode" and len(lengths) > 1:
            raise ProtocolError(
                f"op='encode' takes one block, found {len(lengths)}; make a request for each"
            )
        namespace_name(self.namespace)
        if self.keep != ():
            keep = sequence(self.keep, "keep", len(lengths), len(lengths))
            words = tuple(one_of(n, f"keep[{at}]", get_args(Keep)) for at, n in enumerate(keep))
            object.__setattr__(self, "keep", words if {*words} != {"store"} else ())

    def keep_at(self, place: int) -> Keep:
        """Where a block may be kept."""
        return self.keep[place] if self.keep else "store"

    @property
    def context_tokens(self) -> int:
        """Total tokens of the context blocks."""
        return sum(self.lengths)

    def to_dict(self, secret: str | None = None, default: str = "") -> dict[str, Any]:
        """``kv_transfer_params`` of a request with this plan.

        Args:
            secret: The server's tenant secret, required to name a namespace.
            default: Namespace of requests that name none.

        Raises:
            ValueError: The namespace is not the default one, and there is no secret.
        """
        fields: dict[str, Any] = {"v": VERSION, "op": self.op, "lengths": list(self.lengths)}
        if self.keep:
            fields["keep"] = list(self.keep)
        if secret is not None:
            fields |= {"namespace": self.namespace, "mac": _mac(self, secret)}
        elif self.namespace != default:
            raise ValueError(
                f"the namespace {self.namespace!r} can be named only with the server's tenant "
                "secret; clients send plans without a namespace"
            )
        return {FIELD: fields}


def parse_plan(
    kv_transfer_params: Mapping[str, Any] | None,
    num_prompt_tokens: int,
    *,
    secret: str | None = None,
    namespace: str = "",
) -> BlockPlan | None:
    """Parse the plan in a request's ``kv_transfer_params``; None if there is none.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        secret: The server's tenant secret. A request that names a namespace must be signed with
            it (``BlockPlan.to_dict``).
        namespace: Namespace of requests that name none.

    Raises:
        ProtocolError: The plan is invalid.
    """
    if kv_transfer_params is None:
        return None
    if isinstance(kv_transfer_params, Mapping) and FIELD not in kv_transfer_params:
        return None
    told = record(kv_transfer_params, "kv_transfer_params", (FIELD,))[FIELD]
    fields = record(told, FIELD, ("v", "op", "lengths"), ("keep", "namespace", "mac"))
    check_version(fields["v"])
    is_named = "namespace" in fields or "mac" in fields
    named = fields.get("namespace") if is_named else namespace
    keep = fields.get("keep", ())
    plan = BlockPlan(fields["op"], fields["lengths"], named, keep)  # type: ignore[arg-type]
    if is_named:
        _check_mac(plan, fields.get("mac"), secret)
    _check_fits(plan, num_prompt_tokens)
    return plan


def salt(plan: BlockPlan, profile: ModelProfile, own: str | None = None) -> str:
    """Cache salt of a request: only requests with equal salts share an engine's pages.

    It covers everything except the token ids that determines the pages: the cut, the model and the
    sink. It also covers the tenant and which blocks are private, so response times do not reveal
    what others asked.

    Args:
        own: Salt that the client sent.
    """
    private = [place for place, keep in enumerate(plan.keep) if is_private(keep)]
    cut = [plan.op, plan.lengths, private]
    parts = [profile.fingerprint, profile.sink_ids, plan.namespace, cut, own]
    return "ba1-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def full_mode_salt(secret: str, namespace: str, given: str | None) -> str:
    """Cache salt of a tenant's requests in full mode, which nobody else can guess.

    Without it, response times would reveal what other tenants asked, because an engine shares the
    pages of equal prompts.

    Args:
        secret: The server's tenant secret.
        namespace: Namespace of the tenant.
        given: Salt that the client sent.
    """
    said = json.dumps([VERSION, "full", namespace, given])
    return "tenant-" + _code(said, secret)


def is_salt(cache_salt: object) -> bool:
    """Whether a salt has the form of ours, which clients may not send."""
    return isinstance(cache_salt, str) and _SALT.fullmatch(cache_salt) is not None


def check_version(version: object) -> None:
    """Raise ProtocolError for another version of the protocol."""
    if type(version) is not int or version != VERSION:
        raise ProtocolError(
            f"found version {shown(version)} of the protocol, expected {VERSION}; client "
            "and server need releases of this package with the same version of the protocol"
        )


class BlockId(NamedTuple):
    """One context block of a prompt.

    Args:
        place: Index of the block in the prompt.
        start: Index of its first token in the prompt.
        ids: Token ids.
        digest: ``kv.token_digest`` of the token ids and the sink.
        namespaces: Namespaces to look it up in, its own first.
        keys: Store key in each of them.
        keep: Where it may be kept.
    """

    place: int
    start: int
    ids: tuple[int, ...]
    digest: str
    namespaces: tuple[str, ...]
    keys: tuple[str, ...]
    keep: Keep = "store"

    @property
    def key(self) -> str:
        """Store key in its own namespace."""
        return self.keys[0]


def block_keys(
    token_ids: Sequence[int],
    plan: BlockPlan,
    profile: ModelProfile,
    read_namespaces: Sequence[str] = (),
) -> list[BlockId]:
    """The context blocks of a prompt, with the same store keys as in a local engine.

    The first block of a prompt is encoded without the sink, all others with it.

    Args:
        token_ids: Token ids of the complete prompt. With ``op="encode"``, those of the block, after
            the sink if any.
        read_namespaces: Further namespaces to look blocks up in, in order.

    Raises:
        ProtocolError: The plan does not fit the prompt, or a block to be encoded follows tokens
            other than the sink.
    """
    # Imported here, because clients need no keys and should not load torch.
    from blockattn_rag.kv.block_kv import store_key, token_digest

    _check_fits(plan, len(token_ids))
    start = len(token_ids) - plan.lengths[0] if plan.op == "encode" else 0
    before = tuple(token_ids[:start])
    if before not in ((), profile.sink_ids):
        raise ProtocolError(
            f"found {start} tokens before the block to be encoded, expected none, or the "
            f"{len(profile.sink_ids)} of the server's sink ({profile.sink})"
        )
    access = Access(plan.namespace, tuple(read_namespaces))
    found = []
    for place, length in enumerate(plan.lengths):
        ids = tuple(token_ids[start : start + length])
        digest = token_digest(ids, profile.sink_ids if place else before)
        keep = plan.keep_at(place)
        names = access.namespaces(private=is_private(keep))
        keys = tuple(store_key(profile.fingerprint, digest, name) for name in names)
        found.append(BlockId(place, start, ids, digest, names, keys, keep))
        start += length
    return found


@dataclass(frozen=True, slots=True)
class ServedBlocks:
    """What became of the blocks of a request in block mode.

    Args:
        blocks: Number of context blocks.
        loaded_tokens: Context tokens loaded from a store.
        local_tokens: Context tokens found in the engine's own cache.
        encoded: Blocks encoded for this request, because no store had them.
        encoded_tokens: Their tokens.
        fetch_s: Seconds to load the blocks.
        int8_blocks: Blocks loaded in int8.
        cut_short: A stop string ended the answer, so the engine reported nothing:
            ``loaded_tokens``, ``local_tokens``, ``fetch_s`` and ``int8_blocks`` are unknown and 0.

    Raises:
        ProtocolError: A field is invalid.
    """

    blocks: int
    loaded_tokens: int
    local_tokens: int
    encoded: int = 0
    encoded_tokens: int = 0
    fetch_s: float = 0.0
    int8_blocks: int = 0
    cut_short: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            whole(getattr(self, name), name)
        if type(self.cut_short) is not bool:
            raise ProtocolError(f"cut_short must be true or false, found {shown(self.cut_short)}")
        if self.cut_short and any(getattr(self, name) for name in _TOLD_BY_ENGINE):
            raise ProtocolError(
                f"found cut_short and figures that are unknown then; {', '.join(_TOLD_BY_ENGINE)} "
                "must be 0"
            )
        if self.encoded_tokens < self.encoded or (self.encoded_tokens and not self.encoded):
            raise ProtocolError(
                f"found {self.encoded} encoded blocks of {self.encoded_tokens} tokens together, "
                "which disagree"
            )
        object.__setattr__(self, "fetch_s", real(self.fetch_s, "fetch_s"))

    def to_dict(self) -> dict[str, Any]:
        """``kv_transfer_params`` of the answer."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        return {FIELD: {"v": VERSION, "mode": "block", **figures}}

    @classmethod
    def from_dict(cls, kv_transfer_params: Mapping[str, Any] | None) -> ServedBlocks:
        """Parse an answer's ``kv_transfer_params``, ignoring fields of other connectors.

        Raises:
            ProtocolError: The answer was not computed in block mode, or by another version.
        """
        told = kv_transfer_params
        if not isinstance(told, Mapping) or FIELD not in told:
            raise ProtocolError(
                f"the server's answer holds no {FIELD!r} in kv_transfer_params, found "
                f"{shown(told)}: it was not computed in block mode. Is the connector of this "
                "package configured there?"
            )
        fields = record(told[FIELD], FIELD, ("v", "mode", *_FIGURES))
        check_version(fields["v"])
        one_of(fields["mode"], "mode", ("block",))
        return cls(**{name: fields[name] for name in _FIGURES})


_COUNTS = (
    *("blocks", "loaded_tokens", "local_tokens"),
    *("encoded", "encoded_tokens", "int8_blocks"),
)
_FIGURES = (*_COUNTS, "fetch_s", "cut_short")
_TOLD_BY_ENGINE = ("loaded_tokens", "local_tokens", "fetch_s", "int8_blocks")


def _check_fits(plan: BlockPlan, num_prompt_tokens: int) -> None:
    """Raise ProtocolError if the blocks, and for answers one more token, exceed the prompt."""
    most = num_prompt_tokens - (plan.op == "complete")
    if plan.context_tokens > most:
        raise ProtocolError(
            f"lengths add up to {plan.context_tokens} tokens, expected at most {most}: the prompt "
            f"has {num_prompt_tokens}" + (", the last one is no block's" * (plan.op == "complete"))
        )


def _mac(plan: BlockPlan, secret: str) -> str:
    """HMAC that proves that the writer of a plan has the secret."""
    return _code(json.dumps([VERSION, plan.op, plan.lengths, plan.namespace, plan.keep]), secret)


def _code(said: str, secret: str) -> str:
    """HMAC-SHA256 as 64 hex digits."""
    return hmac.new(secret.encode(), said.encode(), hashlib.sha256).hexdigest()


def _check_mac(plan: BlockPlan, mac: object, secret: str | None) -> None:
    found = text(mac, "mac", "[0-9a-f]{64}", "64 hex digits")
    if secret is None or not hmac.compare_digest(found, _mac(plan, secret)):
        raise ProtocolError(
            "a request may not name its namespace: only the server's endpoint may, which signs it "
            "by the secret that tenant_secret_env names in the connector's options"
        )
