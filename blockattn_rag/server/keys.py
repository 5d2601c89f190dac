"""Store keys of a prompt's blocks, and salts that isolate pages in an engine's prefix cache."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from blockattn_rag.errors import ProtocolError
from blockattn_rag.kv.block_kv import store_key, token_digest
from blockattn_rag.prompts.blocks import STORED, Keep
from blockattn_rag.server.plan import BlockPlan, code
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.protocol import PROTOCOL_VERSION
from blockattn_rag.store.namespaces import Access

_SALT = re.compile(r"ba1-[0-9a-f]{40}")


def salt(plan: BlockPlan, profile: ModelProfile, own: str | None = None) -> str:
    """Return the cache salt of a request. Only requests with equal salts share an engine's pages.

    In addition to token ids, pages depend on the split into blocks, the model, the sink and the
    adapter. The salt covers these, the tenant and the set of private blocks, so that response times
    do not reveal other tenants' prompts. ``own``: The client's salt, or a random value.
    """
    private = [place for place, keep in enumerate(plan.keep) if keep.is_private]
    cut = [plan.op, plan.lengths, private]
    encoding = [profile.fingerprint, profile.sink_ids, profile.recipe.adapter]
    parts = [*encoding, plan.namespace, cut, own]
    return "ba1-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def full_mode_salt(secret: str, namespace: str, given: str | None) -> str:
    """Return a secret cache salt for a tenant's full-mode request with the client's salt ``given``.
    It prevents tenants from sharing pages, which would reveal their prompts in response times."""
    said = json.dumps([PROTOCOL_VERSION, "full", namespace, given])
    return "tenant-" + code(said, secret)


def is_salt(cache_salt: object) -> bool:
    """Whether a cache salt has the format of ``salt``. Clients must not send such salts."""
    return isinstance(cache_salt, str) and _SALT.fullmatch(cache_salt) is not None


class BlockId(NamedTuple):
    """Context block of a prompt, with its store keys.

    Args:
        start: Index of the block's first token in the prompt.
        namespaces: Namespaces to search for the block, the block's own first.
        keys: Store key of the block in each namespace.
        namespace: Namespace of the plan, without the suffix of private blocks.
    """

    place: int
    start: int
    ids: tuple[int, ...]
    digest: str
    namespaces: tuple[str, ...]
    keys: tuple[str, ...]
    keep: Keep = STORED
    namespace: str = ""
    opens_prompt: bool = False

    @property
    def key(self) -> str:
        """Store key in the block's own namespace."""
        return self.keys[0]

    @property
    def name(self) -> tuple[str, bool]:
        """Identity of the block: its key, and whether it may be stored."""
        return self.key, self.keep.is_stored

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def to_encode(self, profile: ModelProfile) -> tuple[list[int], BlockPlan]:
        """Return the prompt that encodes the block (sink and tokens), and its plan."""
        sink = () if self.opens_prompt else profile.sink_ids
        plan = BlockPlan("encode", (self.tokens,), self.namespace, (self.keep,), self.opens_prompt)
        return [*sink, *self.ids], plan


def block_keys(
    token_ids: Sequence[int],
    plan: BlockPlan,
    profile: ModelProfile,
    read_namespaces: Sequence[str] = (),
) -> list[BlockId]:
    """Compute the store keys of a prompt's context blocks, as an engine in process does.

    The first block of a prompt is encoded without sink and adapter, and all others with them. With
    ``op="encode"``, ``token_ids`` is the block after the sink, or alone if it opens a prompt.
    """
    opens_prompt, start = plan.op != "encode", 0
    if plan.op == "encode":
        opens_prompt, start = plan.opens_prompt, len(token_ids) - plan.lengths[0]
        if tuple(token_ids[:start]) != (() if opens_prompt else profile.sink_ids):
            raise ProtocolError(
                f"Found {start} tokens before the block to encode, expected exactly the "
                f"{len(profile.sink_ids)} tokens of the server's sink ({profile.recipe.sink}), or "
                "no tokens with opens_prompt"
            )
    access = Access(plan.namespace, tuple(read_namespaces))
    found = []
    for place, length in enumerate(plan.lengths):
        ids = tuple(token_ids[start : start + length])
        is_first = opens_prompt and not place
        encoding = () if is_first else (profile.sink_ids, profile.recipe.adapter)
        digest = token_digest(ids, *encoding)
        keep = plan.keep[place]
        names = access.namespaces(private=keep.is_private)
        keys = tuple(store_key(profile.fingerprint, digest, name) for name in names)
        block = BlockId(place, start, ids, digest, names, keys, keep, plan.namespace, is_first)
        found.append(block)
        start += length
    return found
