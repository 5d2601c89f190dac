"""Options of the connector: where a server stores blocks, and for whom."""

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
"""Name of the connector in vLLM, and of its class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Options of a serving engine, shared by all its processes.

    Args:
        store: Path or address of the home store, reachable by every process.
        profile: Path of the model's profile, as ``blockattn-rag check --profile`` writes it.
        memory: Size of each rank's cache in main memory, such as ``8GiB``.
        private_memory: Memory of all ranks together for blocks that may not be stored. ``0``:
            requests with such blocks are refused.
        disk: Folder for a local tier between memory and home; None for no such tier.
        cache: Address of a Redis or Valkey server, such as ``redis://valkey/0``, for a tier that
            several servers may share; None for no such tier.
        namespace: Namespace of requests without a tenant.
        read_namespaces: Further namespaces to read from; never written.
        read_only: Store nothing.
        tenant_secret_env: Environment variable with the secret that authenticates tenants of the
            endpoint. Not the secret itself, because engines log their options.
        load_deadline_s: Seconds that a load may take.
        kv_dtype: Format in which this server stores blocks.

    Raises:
        ValueError: An option is unknown, missing or out of range.
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
                "which each would have for itself; expected a path or an address"
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
        """Parse a JSON object; lists become tuples. Raises ValueError as the class."""
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
        """Namespaces of requests without a tenant."""
        return Access(self.namespace, self.read_namespaces, self.read_only)

    @property
    def tenant_secret(self) -> str | None:
        """Secret that authenticates tenants; None for a server without tenants.

        Raises:
            ValueError: The environment variable is empty.
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
        """``private_memory`` in bytes."""
        return bytes_of(self.private_memory)

    def private_tokens(self, profile: ModelProfile) -> int:
        """``private_memory`` in tokens of a model."""
        return self.private_bytes // profile.bytes_per_token

    @property
    def encodes(self) -> bool:
        """Whether this server encodes blocks, for the store or for its memory."""
        return not self.read_only or self.private_bytes > 0

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of each rank's tiers, fastest first."""
        between = [name for name in ("disk", "cache") if getattr(self, name) is not None]
        return ("memory", *between, "home")

    def nearer_tiers(self, profile: ModelProfile, share: Share) -> list[str | KVStore]:
        """Tiers of a rank before the home, fastest first.

        Their names contain the model and the share, because other ranks and models must not read a
        rank's part of a block.
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
    """Raise ValueError for an option of the wrong type."""
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
