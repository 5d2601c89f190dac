"""What a server is told of its blocks: where they are kept, for whom, and what may be done."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from blockattn_rag.kv.quantization import KVDtype, check_kv_dtype
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.shares import Share
from blockattn_rag.store import KVStore, RedisStore
from blockattn_rag.store.namespaces import Access
from blockattn_rag.store.specs import bytes_of, is_cache
from blockattn_rag.store.urls import lasts

CONNECTOR = "BlockAttentionConnector"
"""Class of the connector in vLLM, and the name under which it is registered there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """The options of a serving engine, which every process of it reads alike.

    Args:
        store: the home of all entries, a path or an address that every process can reach.
        profile: path of the model's profile, as ``blockattn-rag check --profile`` writes it.
        memory: bytes of blocks that each rank keeps in its host's memory, such as ``8GiB``.
        private_memory: bytes of blocks that may not be stored, which all ranks together keep in
            their hosts' memory; ``0`` for none: requests with such blocks are refused.
        disk: a folder of this machine between memory and home; none if null.
        cache: a Redis or Valkey server between those and the home, such as ``redis://valkey/0``,
            which several servers may have in common; none if null.
        namespace: where blocks are stored and looked for, unless a request names its tenant.
        read_namespaces: where they are looked for next; never written.
        read_only: nothing is stored.
        tenant_secret_env: the environment variable that holds the secret by which the endpoint
            vouches for tenants. Not the secret itself: engines print their options.
        load_deadline_s: seconds that a load of blocks may take.
        kv_dtype: what blocks are stored in that are encoded here.

    Raises:
        ValueError: an option is unknown, missing or out of range.
    """

    store: str
    profile: str
    memory: str = "8GiB"
    private_memory: str = "4GiB"
    disk: str | None = None
    cache: str | None = None
    namespace: str = ""
    read_namespaces: tuple[str, ...] = ()
    read_only: bool = False
    tenant_secret_env: str | None = None
    load_deadline_s: float = 10.0
    kv_dtype: KVDtype = "model"

    def __post_init__(self) -> None:
        for one in fields(self):
            _check_type(one.name, getattr(self, one.name))
        if not lasts(self.store):
            raise ValueError(
                f"the store of a server must be seen by all its processes, found {self.store!r}, "
                "which each would have for itself; give a path or an address"
            )
        if self.cache is not None and not is_cache(self.cache):
            raise ValueError(
                "cache must be the address of a Redis or Valkey server, such as "
                f"redis://host:port/database, found {self.cache!r}"
            )
        if self.load_deadline_s <= 0:
            raise ValueError(f"load_deadline_s must be positive, found {self.load_deadline_s}")
        check_kv_dtype(self.kv_dtype)
        _ = self.access, self.private_bytes  # checks the names, and the size

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> ServingConfig:
        """From the JSON object that an operator wrote; lists become tuples.

        Raises:
            ValueError: as the class.
        """
        known = {one.name for one in fields(cls)}
        required = [one.name for one in fields(cls) if one.default is MISSING]
        unknown = [name for name in options if name not in known]
        absent = [name for name in required if name not in options]
        if unknown or absent:
            found = f"the unknown option {unknown[0]!r}" if unknown else f"no {absent[0]!r}"
            raise ValueError(
                f"a server's options are {', '.join(sorted(known))}, of which "
                f"{' and '.join(required)} must be given; found {found}"
            )
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in options.items()
        }
        return cls(**values)

    @property
    def access(self) -> Access:
        """In which namespaces blocks are read and stored, tenants aside."""
        return Access(self.namespace, self.read_namespaces, self.read_only)

    @property
    def tenant_secret(self) -> str | None:
        """The secret by which the endpoint vouches for tenants; None if there are none.

        Raises:
            ValueError: the variable that should hold it is empty.
        """
        if self.tenant_secret_env is None:
            return None
        secret = os.environ.get(self.tenant_secret_env, "")
        if not secret:
            raise ValueError(
                f"tenant_secret_env names the environment variable {self.tenant_secret_env}, "
                "which is empty; set it to a long random text for every process of the server"
            )
        return secret

    @property
    def private_bytes(self) -> int:
        """What may be kept of blocks that may not be stored."""
        return bytes_of(self.private_memory)

    def private_tokens(self, profile: ModelProfile) -> int:
        """How many tokens of blocks that may not be stored are kept in memory, of this model."""
        return self.private_bytes // profile.bytes_per_token

    @property
    def encodes(self) -> bool:
        """Whether anything is encoded here: for the store, or for this server's memory alone."""
        return not self.read_only or self.private_bytes > 0

    @property
    def tier_names(self) -> tuple[str, ...]:
        """What the tiers of each rank are called, the home last."""
        between = [name for name in ("disk", "cache") if getattr(self, name) is not None]
        return ("memory", *between, "home")

    def nearer_tiers(self, profile: ModelProfile, share: Share) -> list[str | KVStore]:
        """Stores that a rank has before the home, fastest first.

        They hold what the rank does of each block, and so are named by that: ranks that share out
        heads and layers otherwise, or another model, must not find it there.
        """
        name = f"{profile.fingerprint[:16]}/{share.name}"
        tiers: list[str | KVStore] = [f"memory:{self.memory}"]
        if self.disk is not None:
            tiers.append(str(Path(self.disk) / name))
        if self.cache is not None:
            tiers.append(RedisStore(self.cache, prefix=f"blockattn-rag:{name}:"))
        return tiers


_TEXTS = {"store", "profile", "memory", "private_memory", "namespace", "kv_dtype"}
_OPTIONAL_TEXTS = {"disk", "cache", "tenant_secret_env"}
_TEXT_LISTS = {"read_namespaces"}


def _check_type(name: str, value: object) -> None:
    """Refuse an option of another type than its own."""
    if name in _TEXTS:
        expected, is_right = "a text", isinstance(value, str)
    elif name in _OPTIONAL_TEXTS:
        expected, is_right = (
            "a text or null",
            value is None or (isinstance(value, str) and value != ""),
        )
    elif name in _TEXT_LISTS:
        expected = "a list of texts"
        is_right = isinstance(value, tuple) and all(isinstance(one, str) for one in value)
    elif name == "load_deadline_s":
        expected, is_right = "a number", type(value) in (int, float)
    else:
        expected, is_right = "true or false", isinstance(value, bool)
    if not is_right:
        raise ValueError(f"{name} must be {expected}, found {value!r:.80}")
