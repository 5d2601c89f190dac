"""What client and server say to each other about blocks, and what a server makes of it.

A client sends a prompt as token ids, how many of them each context block has, and what may become
of each. It sends neither keys nor digests nor places of anything: the server computes keys from the
ids that it was sent, so that a client finds the keys and values of tokens that it has itself, and
no others.

Importing this loads no torch.
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
"""The field of ``kv_transfer_params`` that is ours, in requests and in answers."""

MOST_BLOCKS = 256

Op = Literal["complete", "encode"]
"""``complete``: answer from the blocks. ``encode``: compute one block's keys and values, and keep
them."""

_OPS: tuple[Op, ...] = ("complete", "encode")
_SALT = re.compile(r"ba1-[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How a prompt is cut, as a request says.

    Args:
        op: what is asked.
        lengths: tokens of each context block, in order. ``complete``: they stand at the start of
            the prompt, and at least one token follows. ``encode``: one block, at the end.
        namespace: for whom, as ``store.namespaces``.
        keep: what may become of each block; ``()`` if all may be stored.

    Raises:
        ProtocolError: an unknown op, no block, too many, one of no token, no name, or not one word
            on what may become of each block.
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
        """What may become of a block."""
        return self.keep[place] if self.keep else "store"

    @property
    def context_tokens(self) -> int:
        """Tokens of all context blocks."""
        return sum(self.lengths)

    def to_dict(self, secret: str | None = None, default: str = "") -> dict[str, Any]:
        """``kv_transfer_params`` of a request with this plan.

        Args:
            secret: the server's tenant secret, which alone allows to name a namespace.
            default: the namespace of requests that name none, which needs no naming.

        Raises:
            ValueError: there is another namespace and no secret.
        """
        fields: dict[str, Any] = {"v": VERSION, "op": self.op, "lengths": list(self.lengths)}
        if self.keep:
            fields["keep"] = list(self.keep)
        if secret is not None:
            fields |= {"namespace": self.namespace, "mac": _mac(self, secret)}
        elif self.namespace != default:
            raise ValueError(
                f"the namespace {self.namespace!r} can be named with the server's tenant secret "
                "alone, found none; a client sends a plan without a namespace"
            )
        return {FIELD: fields}


def parse_plan(
    kv_transfer_params: Mapping[str, Any] | None,
    num_prompt_tokens: int,
    *,
    secret: str | None = None,
    namespace: str = "",
) -> BlockPlan | None:
    """The plan in a request's ``kv_transfer_params``; None if these are not ours.

    Args:
        num_prompt_tokens: of the prompt that came with it.
        secret: the server's tenant secret. A request may name a namespace only if it holds the
            secret's code for this very plan (``BlockPlan.to_dict``).
        namespace: the server's own, of requests that name none.

    Raises:
        ProtocolError: something in it is not as the protocol has it; says what.
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
    """The cache salt of a request: only requests with equal salts may share an engine's pages.

    In it is all that decides the pages' keys and values beside the token ids: where the prompt is
    cut, the model, and the sink; and for whom, and what is private, so that nobody learns by the
    time that an answer takes what another tenant asked, or who encoded a private block.

    Args:
        own: the salt that the client gave, who wants to share pages with its like alone.
    """
    private = [place for place, keep in enumerate(plan.keep) if is_private(keep)]
    cut = [plan.op, plan.lengths, private]
    parts = [profile.fingerprint, profile.sink_ids, plan.namespace, cut, own]
    return "ba1-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def full_mode_salt(secret: str, namespace: str, given: str | None) -> str:
    """The cache salt of a tenant's requests in full mode, which nobody else can guess.

    Without it, how long an answer takes would tell what other tenants asked: an engine shares the
    pages of equal prompts.

    Args:
        secret: the server's tenant secret.
        namespace: the tenant's.
        given: what the client asks for itself, to keep its own requests apart.
    """
    said = json.dumps([VERSION, "full", namespace, given])
    return "tenant-" + _code(said, secret)


def is_salt(cache_salt: object) -> bool:
    """Whether a text has the form of our salts, which no client may set itself."""
    return isinstance(cache_salt, str) and _SALT.fullmatch(cache_salt) is not None


def check_version(version: object) -> None:
    """Refuse, by a ProtocolError, another version of the protocol than this one."""
    if type(version) is not int or version != VERSION:
        raise ProtocolError(
            f"found version {shown(version)} of the protocol, expected {VERSION}: client and "
            "server need releases of this package that speak the same one"
        )


class BlockId(NamedTuple):
    """One context block of a prompt.

    Args:
        place: which one, from 0.
        start: place of its first token in the prompt.
        ids: its token ids.
        digest: ``kv.token_digest`` of them, and of the sink where it is encoded after that.
        namespaces: where to look for it; the first one is its own.
        keys: in each of these.
        keep: what may become of it.
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
        """Where it is kept."""
        return self.keys[0]


def block_keys(
    token_ids: Sequence[int],
    plan: BlockPlan,
    profile: ModelProfile,
    read_namespaces: Sequence[str] = (),
) -> list[BlockId]:
    """A prompt's context blocks, and where stores hold them: as an engine of this package has it.

    The first block of a prompt is encoded alone, all others after the profile's sink.

    Args:
        token_ids: of the whole prompt. With ``op="encode"`` the block alone, or after the sink.
        read_namespaces: where to look next, in this order.

    Raises:
        ProtocolError: the plan does not fit the prompt; or a block to be encoded stands after
            anything else than the sink.
    """
    # Here, so that a client, which needs no keys, loads no torch.
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
    """What a server says of a request that it served in block mode.

    Args:
        blocks: context blocks.
        loaded_tokens: of these, tokens whose keys and values were loaded from a store.
        local_tokens: of these, tokens that the engine still had in its own cache.
        encoded: blocks that were computed for this request, because no store had them.
        encoded_tokens: their tokens.
        fetch_s: seconds from asking the stores until all blocks were there.
        int8_blocks: blocks that came quantised.
        cut_short: a stop string ended the answer before the engine itself did, which then tells
            nothing: ``loaded_tokens``, ``local_tokens``, ``fetch_s`` and ``int8_blocks`` are 0, as
            they are not known.

    Raises:
        ProtocolError: a figure is none.
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
        """From an answer's ``kv_transfer_params``; what others say there is left alone.

        Raises:
            ProtocolError: they do not say, as this version does, that the answer was computed in
                block mode.
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
    """A final block has at least one token; a block to be encoded is not longer than its prompt."""
    most = num_prompt_tokens - (plan.op == "complete")
    if plan.context_tokens > most:
        raise ProtocolError(
            f"lengths add up to {plan.context_tokens} tokens, expected at most {most}: the prompt "
            f"has {num_prompt_tokens}" + (", the last one is no block's" * (plan.op == "complete"))
        )


def _mac(plan: BlockPlan, secret: str) -> str:
    """What proves that whoever wrote a plan knows the secret: 64 hex digits of HMAC-SHA256."""
    return _code(json.dumps([VERSION, plan.op, plan.lengths, plan.namespace, plan.keep]), secret)


def _code(said: str, secret: str) -> str:
    """64 hex digits of HMAC-SHA256."""
    return hmac.new(secret.encode(), said.encode(), hashlib.sha256).hexdigest()


def _check_mac(plan: BlockPlan, mac: object, secret: str | None) -> None:
    found = text(mac, "mac", "[0-9a-f]{64}", "64 hex digits")
    if secret is None or not hmac.compare_digest(found, _mac(plan, secret)):
        raise ProtocolError(
            "a request may not name its namespace: the server's own endpoint does, and proves it "
            "by the secret that tenant_secret_env names in the connector's options"
        )
