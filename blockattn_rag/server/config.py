"""Options of the connector: stores, tenants, and the recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, StrictBool
from pydantic.dataclasses import dataclass

from blockattn_rag.engine.find_recipe import AUTO, resolve_recipe
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import ServingError
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.model.checkpoint import CheckpointModel
from blockattn_rag.server.profile import ModelProfile, profile_of
from blockattn_rag.server.shares import Share
from blockattn_rag.server.validation import STRICT, Digest, Namespace, parse
from blockattn_rag.store import KVStore, RedisStore, open_store
from blockattn_rag.store.urls import bytes_of, is_cache, lasts

CONNECTOR = "BlockAttentionConnector"
"""Name of the connector in vLLM, and of its class."""


def as_computed(engine: Any) -> tuple[str, str]:
    """Return the values of vLLM's ``cache_dtype`` for which the cache has the model's dtype."""
    return "auto", str(engine.model_config.dtype).removeprefix("torch.")


NOT_RECOMPUTING: dict[str, Callable[[Any], bool]] = {
    "--enable-lora": lambda engine: engine.lora_config is not None,
    "--pipeline-parallel-size": lambda engine: engine.parallel_config.pipeline_parallel_size > 1,
    "--kv-cache-dtype": lambda engine: engine.cache_config.cache_dtype not in as_computed(engine),
}
"""vLLM options that prevent the recomputation of tokens, with functions that detect their use."""


def _check_size(size: str) -> str:
    bytes_of(size)  # raises ValueError
    return size


def _check_lasts(store: str) -> str:
    if not lasts(store):
        raise ValueError(
            "Expected a path or an address that all processes of the server can access, found "
            f"{store!r}, which is private to each process"
        )
    return store


def _check_cache(cache: str) -> str:
    if not is_cache(cache):
        raise ValueError(
            "Expected the address of a Redis or Valkey server, such as "
            f"redis://host:port/database, found {cache!r}"
        )
    return cache


_Text = Annotated[str, Field(min_length=1)]
_Size = Annotated[str, AfterValidator(_check_size)]


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Options of the connector, shared by all processes of a server (docs/guides/serving_vllm.md).

    ``tenant_secret_env`` names an environment variable for the secret, because vLLM logs options.
    """

    store: Annotated[str, AfterValidator(_check_lasts)]
    recipe: _Text = AUTO
    memory: _Size = "8GiB"
    private_memory: _Size = "4GiB"
    disk: _Text | None = None
    cache: Annotated[str, AfterValidator(_check_cache)] | None = None
    namespace: Namespace = ""
    read_namespaces: tuple[Namespace, ...] = ()
    read_only: StrictBool = False
    tenant_secret_env: _Text | None = None
    recognize: StrictBool | Literal["system", "sources"] = False
    load_deadline_s: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 10.0
    kv_dtype: KVDtype = "model"
    fingerprint: Digest | None = None
    recipe_digest: Digest | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> ServingConfig:
        """Parse options from a JSON object. Raises ProtocolError, which is a ValueError."""
        return parse(cls, options, "kv_connector_extra_config")

    @property
    def tenant_secret(self) -> str | None:
        """Secret that authenticates tenants, or None if the server has no tenants."""
        if self.tenant_secret_env is None:
            return None
        secret = os.environ.get(self.tenant_secret_env, "")
        if not secret:
            raise ValueError(
                f"tenant_secret_env names the environment variable {self.tenant_secret_env}, which "
                "is empty or not set; set it to a long random string for every process of the "
                "server"
            )
        return secret

    def profile_of(
        self, model: str, dtype: torch.dtype, revision: str | None = None
    ) -> tuple[ModelProfile, Recipe]:
        """Build the profile of a model that vLLM runs, and load its recipe. Weights are not
        loaded, but their files are hashed once, which takes a few seconds per 10 GB."""
        checkpoint = CheckpointModel(model, dtype, revision)
        recipe = resolve_recipe(self.recipe, checkpoint, open_store(self.store))
        profile = profile_of(checkpoint, recipe)
        for what, found, expected in (
            ("model", profile.fingerprint, self.fingerprint),
            ("recipe", recipe.digest, self.recipe_digest),
        ):
            if expected is not None and found != expected:
                raise ServingError(
                    f"The {what} of this process ({found[:12]}) differs from the one that the "
                    f"server was started with ({expected[:12]}). If its files changed, restart the "
                    "server. Otherwise, remove the vLLM options that select other files"
                )
        return profile, recipe

    @property
    def private_bytes(self) -> int:
        return bytes_of(self.private_memory)

    def private_tokens(self, profile: ModelProfile) -> int:
        return self.private_bytes // profile.bytes_per_token

    @property
    def encodes(self) -> bool:
        """Whether this server encodes blocks, to store them or to keep them in memory."""
        return not self.read_only or self.private_bytes > 0

    def nearer_tiers(self, profile: ModelProfile, share: Share) -> dict[str, str | KVStore]:
        """Return a rank's tiers in front of the home, by name, fastest first. Entries contain only
        this rank's share, so the folder and the key prefix identify the model and the share."""
        name = f"{profile.fingerprint[:16]}/{share.name}"
        tiers: dict[str, str | KVStore] = {"memory": f"memory:{self.memory}"}
        if self.disk is not None:
            tiers["disk"] = str(Path(self.disk) / name)
        if self.cache is not None:
            tiers["cache"] = RedisStore(self.cache, prefix=f"blockattn-rag:{name}:")
        return tiers
