"""Options for serving a model with vLLM."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blockattn_rag.app.rag.database import AUTO_SETTING, Manifest, require_manifest
from blockattn_rag.app.rag.names import check_recipe
from blockattn_rag.engine.find_recipe import resolve_recipe
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


class ServerOptions(NamedTuple):
    """Arguments for ``launch.vllm_command``. ``revision``: Commit on the hub. None for a folder."""

    source: str
    dtype: str
    connector: dict[str, Any]
    revision: str | None


def settings_of(path: Path) -> Manifest:
    """Return a database's manifest with its store, or raise DatabaseError if it uses a server."""
    manifest = require_manifest(path)
    if manifest.servers:
        raise DatabaseError(
            f"{path} uses the server {manifest.servers[0]}, which has its own model and store; "
            "pass MODEL and --store instead of --db"
        )
    return replace(manifest, store=manifest.store or str(path.resolve() / "kv"))


def server_options(
    settings: Manifest, folder: Path | None = None, conflicting_option: str | None = None
) -> ServerOptions:
    """Return the options for serving a model with vLLM.

    Checks that the model and its recipe can be served, without loading the weights. Hashes the
    weight files unless their digests are cached.

    Args:
        settings: Settings of a database, or of a server without one. ``store`` is required.
        folder: Folder of the database, which may contain its recipe. Default: no database.
        conflicting_option: vLLM option in use that does not support recomputation. With the recipe
            ``"auto"``, recomputation is then turned off, and a warning is logged. vLLM's workers
            reject any other recipe that recomputes. Default: None.
    """
    assert settings.store is not None
    check_no_credentials(settings.store)
    check_recipe(settings.recipe)
    source = resolve_name(settings.model)
    commit = commit_of(settings.model)
    dtype = _dtype_of(settings, commit)
    model = CheckpointModel(settings.model, DTYPES[dtype], commit)
    store = open_store(settings.store)
    recipe = resolve_recipe(settings.recipe, model, store, folder, stock=settings.stock)
    if recipe.recompute and conflicting_option and settings.recipe == AUTO_SETTING:
        logger.warning("Recomputation is off, because %s does not support it", conflicting_option)
        recipe = replace(recipe, recompute=0.0)
    connector = {
        "store": settings.store,
        "recipe": _name_of(recipe),
        "fingerprint": profile_of(model, recipe).fingerprint,
    }
    if recipe.adapter is not None:  # Its files may change before vLLM's processes read them.
        connector["recipe_digest"] = recipe.digest
    changed = {"namespace": settings.namespace, "kv_dtype": settings.kv_dtype}
    connector |= {name: value for name, value in changed.items() if value not in ("", "model")}
    return ServerOptions(source, dtype, connector, commit)


def _dtype_of(settings: Manifest, commit: str | None) -> str:
    dtype = settings.dtype
    if dtype in WEIGHTS:
        raise ValueError(
            f"dtype={dtype!r} quantizes weights only in process, not in vLLM; serve a quantized "
            "checkpoint of the model instead, with a separate database"
        )
    if dtype == AUTO_SETTING:
        config = load_config(settings.model, revision=commit)
        own = getattr(config, "dtype", None) if torch.cuda.is_available() else None
        dtype = str(own or torch.float32).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"Unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    return dtype


def _name_of(recipe: Recipe) -> str:
    """Return a recipe's text form or, if it has an adapter, a folder with a copy of the recipe.
    The copy is in the user's cache, so replacing the recipe does not affect a starting server."""
    if recipe.adapter is None:
        return str(recipe)
    folder = state_folder() / "recipes" / recipe.digest[:32]
    if not (folder / RECIPE_FILE).is_file():
        # Rewrite the folder even if it exists, because a process may have died while writing it.
        folder.parent.mkdir(parents=True, exist_ok=True)
        recipe.save(folder)
    return str(folder)
