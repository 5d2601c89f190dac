"""What vLLM needs to serve a model: the model, a store, and a profile that is measured once."""

from __future__ import annotations

import gc
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockattn_rag import __version__
from blockattn_rag.app.rag.database import AUTO_SETTING, require_manifest
from blockattn_rag.app.rag.names import check_recipe
from blockattn_rag.check.model import check_model
from blockattn_rag.engine.find_recipe import known_digests, resolve_recipe
from blockattn_rag.engine.outline import STOCK
from blockattn_rag.errors import DatabaseError, UnsupportedModelError
from blockattn_rag.files import state_folder
from blockattn_rag.model import BlockModel
from blockattn_rag.model.loading import is_adapter, load_config, resolve_name
from blockattn_rag.model.quantized import WEIGHTS
from blockattn_rag.server.profile import VERSION, ModelProfile, profile_of
from blockattn_rag.store import open_store
from blockattn_rag.store.directory import RECIPE_FOLDER
from blockattn_rag.store.urls import check_no_credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model, and the store of its keys and values."""

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
        if manifest.server is not None:
            raise DatabaseError(
                f"{path} uses the server {manifest.server}, which has a model and a store of its "
                "own; pass the MODEL and the --store to serve"
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

    @property
    def source(self) -> str:
        source = resolve_name(self.model)
        if is_adapter(source):
            raise UnsupportedModelError(
                f"{self.model} is a LoRA adapter, expected a complete model: merge it into its base"
            )
        return source

    def connector(self, profile: Path) -> dict[str, Any]:
        """Options of the connector, with a profile of ``profile_file`` or of the user."""
        options = {"store": self.store, "profile": str(profile.resolve())}
        if ModelProfile.read(profile).adapter:
            kept = profile.with_name(RECIPE_FOLDER)
            if not kept.is_dir() and self.recipe == AUTO_SETTING:
                raise ValueError(
                    f"{profile} was written with a recipe that has an adapter, and there is no "
                    f"recipe at {kept}; pass the folder of that recipe as --recipe"
                )
            options["recipe"] = str(kept.resolve()) if kept.is_dir() else self.recipe
        changed = {"namespace": self.namespace, "kv_dtype": self.kv_dtype}
        return options | {
            name: value for name, value in changed.items() if value not in ("", "model")
        }


def profile_file(served: Served) -> Path:
    """File with the profile of a model, dtype and recipe. It is measured if it is missing.

    The file is in a folder of the user's cache, together with the recipe if that has an adapter. A
    changed model has another folder.
    """
    check_recipe(served.recipe)
    config = load_config(served.source)
    dtype = _dtype(served, config)
    file = state_folder() / "profiles" / _key(served, dtype, config) / "profile.json"
    if not file.is_file():
        _measure(served, dtype, file)
        gc.collect()  # vLLM needs the memory of the weights
    return file


def _dtype(served: Served, config: Any) -> str:
    if served.dtype in WEIGHTS:
        raise ValueError(
            f"dtype={served.dtype!r} quantizes the weights in this process, but vLLM loads them "
            "itself; serve a quantized checkpoint of the model instead, with a database of its own"
        )
    if served.dtype != AUTO_SETTING:
        return served.dtype
    dtype = getattr(config, "dtype", None) if torch.cuda.is_available() else None
    return str(dtype or torch.float32).removeprefix("torch.")


def _key(served: Served, dtype: str, config: Any) -> str:
    """Digest of everything that a profile depends on, without reading the weights."""
    folder = Path(served.source)
    stats = [(path, path.stat()) for path in sorted(folder.glob("*")) if folder.is_dir()]
    parts = {
        "version": [__version__, VERSION],
        "model": str(folder.resolve()) if stats else [served.source, config._commit_hash],
        "files": [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        "dtype": dtype,
        "recipes": [
            served.recipe,
            *known_digests(served.recipe, served.store, served.source, served.folder, served.stock),
        ],
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _measure(served: Served, dtype: str, file: Path) -> None:
    # On the CPU, so that all of the accelerator's memory is left for vLLM.
    model = BlockModel.from_pretrained(served.model, dtype=dtype, device="cpu")
    recipe = resolve_recipe(
        served.recipe,
        model,
        open_store(served.store),
        served.folder,
        stock=served.stock,
        can_recompute=False,
    )
    report = check_model(model, recipe)
    if failed := [row for row in report.rows if not row.passed]:
        raise UnsupportedModelError(
            f"Block mode is not exact for {served.model}: {failed[0].name}, {failed[0].detail}; "
            f"see `blockattn-rag check {served.model}`"
        )
    profile = profile_of(model, recipe)
    file.parent.mkdir(parents=True, exist_ok=True)
    if recipe.adapter is not None:
        recipe.save(file.with_name(RECIPE_FOLDER))
    profile.write(file)  # last, because a folder with a profile is complete
