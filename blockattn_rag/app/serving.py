"""Inputs for serving a model with vLLM: model, store, recipe, and dtype."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from blockattn_rag.app.rag.database import AUTO_SETTING, require_manifest
from blockattn_rag.app.rag.names import check_recipe
from blockattn_rag.engine.find_recipe import resolve_recipe
from blockattn_rag.engine.outline import STOCK
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.recipe_files import RECIPE_FILE
from blockattn_rag.errors import DatabaseError
from blockattn_rag.files import state_folder
from blockattn_rag.model.checkpoint import CheckpointModel
from blockattn_rag.model.loading import commit_of, load_config, resolve_name
from blockattn_rag.model.quantized import WEIGHTS
from blockattn_rag.server.profile import DTYPES, profile_of
from blockattn_rag.store import open_store
from blockattn_rag.store.urls import check_no_credentials

logger = logging.getLogger("blockattn_rag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Model to serve, and the store of its keys and values."""

    model: str
    store: str
    recipe: str = AUTO_SETTING
    stock: str = STOCK
    dtype: str = AUTO_SETTING
    namespace: str = ""
    kv_dtype: str = "model"
    folder: Path | None = None

    def __post_init__(self) -> None:
        check_no_credentials(self.store)

    @classmethod
    def of_database(cls, path: Path) -> Served:
        manifest = require_manifest(path)
        if manifest.servers:
            raise DatabaseError(
                f"{path} uses the server {manifest.servers[0]}, which has its own model and store; "
                "pass the MODEL and the --store to serve"
            )
        return cls(
            model=manifest.model,
            store=manifest.store or str(path.resolve() / "kv"),
            recipe=manifest.recipe,
            stock=manifest.stock,
            dtype=manifest.dtype,
            namespace=manifest.namespace,
            kv_dtype=manifest.kv_dtype,
            folder=path.resolve(),
        )

    def options(self, conflicting_option: str | None = None) -> ServerOptions:
        """Return the options for serving the model with vLLM.

        Checks that the model and its recipe can be served, without loading the weights. Hashes the
        weight files unless their digests are cached.

        Args:
            conflicting_option: vLLM option in use that does not support recomputation. An automatic
                recipe then recomputes no tokens and logs a warning. vLLM's workers reject any other
                recipe that recomputes. Default: None.

        Raises:
            UnsupportedModelError: The model cannot be served in block mode.
            ValueError: The recipe cannot be used, or the dtype is unknown.
            OSError: The model cannot be read.
        """
        check_recipe(self.recipe)
        source = resolve_name(self.model)
        commit = commit_of(self.model)
        dtype = self._dtype(commit)
        model = CheckpointModel(self.model, DTYPES[dtype], commit)
        recipe = resolve_recipe(
            self.recipe,
            model,
            open_store(self.store),
            self.folder,
            stock=self.stock,
        )
        if recipe.recompute and conflicting_option and self.recipe == AUTO_SETTING:
            logger.warning(
                "No tokens will be recomputed, because %s does not support it", conflicting_option
            )
            recipe = replace(recipe, recompute=0.0)
        profile = profile_of(model, recipe)
        connector = {
            "store": self.store,
            "recipe": _name_of(recipe),
            "fingerprint": profile.fingerprint,
        }
        if recipe.adapter is not None:  # An adapter requires a file.
            connector["recipe_digest"] = recipe.digest
        changed = {"namespace": self.namespace, "kv_dtype": self.kv_dtype}
        connector |= {name: value for name, value in changed.items() if value not in ("", "model")}
        return ServerOptions(source, dtype, connector, commit)

    def _dtype(self, commit: str | None) -> str:
        dtype = self.dtype
        if dtype in WEIGHTS:
            raise ValueError(
                f"dtype={dtype!r} quantizes weights only in process, not in vLLM; serve a "
                "quantized checkpoint of the model instead, with a separate database"
            )
        if dtype == AUTO_SETTING:
            config = load_config(self.model, revision=commit)
            own = getattr(config, "dtype", None) if torch.cuda.is_available() else None
            dtype = str(own or torch.float32).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"Unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
        return dtype


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Arguments that vLLM is started with.

    Args:
        source: Folder or hub id of the model.
        dtype: Dtype that vLLM computes in.
        connector: Options of the connector, see ``server.config.ServingConfig``.
        revision: Commit on the hub. None for a folder.
    """

    source: str
    dtype: str
    connector: dict[str, Any]
    revision: str | None = None


def _name_of(recipe: Recipe) -> str:
    """Return a recipe's text form, or a folder with it. The folder is a copy in the user's cache,
    so that replacing the recipe does not affect a server that is starting."""
    if recipe.adapter is None:
        return str(recipe)
    folder = state_folder() / "recipes" / recipe.digest[:32]
    if not (folder / RECIPE_FILE).is_file():
        # Rewrite the folder even if it exists, because a process may have died while writing it.
        folder.parent.mkdir(parents=True, exist_ok=True)
        recipe.save(folder)
    return str(folder)
