"""Finds the recipe of an engine, and checks that the model can run it."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from blockattn_rag.engine.outline import FAST, FREE_SINK, STOCK, STOCK_SOURCE, TEXT_FORMS
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.recipe_files import RECIPE_FILE, read_fields
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model import BlockModel
from blockattn_rag.model.checkpoint import CheckpointModel
from blockattn_rag.model.gguf import is_gguf
from blockattn_rag.model.loading import SHORT_NAMES
from blockattn_rag.model.recompute import can_recompute, check_can_recompute
from blockattn_rag.prompts.checkpoints import other_switches
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.store.base import KVStore
from blockattn_rag.store.directory import RECIPE_FOLDER, DirectoryStore

logger = logging.getLogger("blockattn_rag")

RecipeLike = Recipe | str | Path
AnyModel = BlockModel | CheckpointModel
AUTO = "auto"

_SHIPPED = Path(__file__).parent / "recipes"

# Subjects of the warnings logged for each model: even with several engines, each is logged once.
_warned_of: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def resolve_recipe(
    given: RecipeLike | None,
    model: AnyModel,
    store: KVStore,
    folder: Path | None = None,
    *,
    stock: str = STOCK,
) -> Recipe:
    """Determine the recipe that an engine uses (``docs/guides/stock_models.md``).

    Args:
        given: A recipe, a recipe's folder, settings such as ``"head+recompute:0.1"``
            (``engine.outline``), or ``"auto"``. None means ``"auto"``.
        folder: Folder of the database that the store belongs to.
        stock: Settings of ``"auto"`` for a stock model without a recipe.

    Raises:
        ValueError: The recipe is missing, invalid or damaged, or does not belong to the model.
        UnsupportedModelError: The model cannot use an adapter, or cannot recompute tokens.
        OSError: The recipe cannot be read.
        TypeError: ``given`` has an unsupported type.
    """
    if given is None or given == AUTO:
        return _automatic(model, store, folder, stock)
    if isinstance(given, Recipe):
        recipe = given
    elif isinstance(given, str | Path):
        recipe = _settings(given) or Recipe.load(given)
    else:
        raise TypeError(
            f"Invalid recipe {given!r:.80}: expected a Recipe, a recipe's folder, 'auto', or "
            f"{TEXT_FORMS}."
        )
    check_fits(recipe, model)
    name = model.checkpoint.hub_id if model.checkpoint else model.name
    used = {"positions": recipe.positions, "sink": recipe.sink}
    if why := other_switches(name, model.tuned_with, used):
        _warn_once(model, why, about=why)
    return recipe


def _settings(given: str | Path) -> Recipe | None:
    return Recipe.of_text(given) if isinstance(given, str) else None


def check_fits(recipe: Recipe, model: AnyModel) -> None:
    """Raise ``ValueError`` or ``UnsupportedModelError`` if a model cannot run a recipe."""
    if why := foreign(recipe, model):
        raise ValueError(
            f"{why} Use recipe='auto', or create a recipe for this model: {_repair(model)}."
        )
    sink_ids(recipe.sink, model.tokenizer)
    if recipe.recompute:
        check_can_recompute(model)
    if recipe.adapter:
        if any(kind.attention == "latent" for kind in model.profile.kinds):
            raise UnsupportedModelError(
                f"{model.name} cannot use a recipe with an adapter, because adapters do not "
                "support multi-head latent attention: use a sink and promote=1"
            )
        recipe.adapter.check_shapes(model.profile.layer_outlines)


def foreign(recipe: Recipe, model: AnyModel) -> str:
    """Sentence that explains why a recipe does not belong to a model. Empty if it does."""
    if not recipe.fingerprints or model.fingerprint in recipe.fingerprints:
        return ""
    known = ", ".join(f"{fingerprint[:12]}..." for fingerprint in recipe.fingerprints)
    return (
        f"The recipe {recipe.source or recipe} belongs to {recipe.model or 'a model'} with the "
        f"fingerprint {known}, found {model.name} with {model.fingerprint[:12]}...: the weights, "
        "dtype or tokenizer differ."
    )


def _automatic(model: AnyModel, store: KVStore, folder: Path | None, stock: str) -> Recipe:
    if model.is_block_tuned:
        trained: dict[str, Any] = {**model.tuned_with}
        return Recipe(**trained, source="block-fine-tuned")
    if (found := _found(model, store, folder)) is not None:
        return found
    recipe = stock_recipe(model, stock)
    _warn_once(model, _trade(model, recipe, folder))
    return recipe


def stock_recipe(model: AnyModel, stock: str = STOCK) -> Recipe:
    """Create the recipe of a stock model from the settings ``stock``, or from ``FREE_SINK`` if they
    recompute tokens and the model cannot."""
    if (settings := Recipe.of_text(stock)) is None:
        raise ValueError(f"Invalid settings {stock!r}: expected {TEXT_FORMS}.")
    if settings.recompute and not can_recompute(model):
        settings = Recipe(FREE_SINK)
    # Without promotion, state layers would not process any passage.
    promote = settings.promote or int(model.profile.has_states)
    return replace(settings, promote=promote, source=STOCK_SOURCE)


def recipe_in_use(model: AnyModel, store: KVStore, folder: Path | None = None) -> Recipe | None:
    """Find a stock model's recipe for ``"auto"``. None if it is invalid or has no adapter."""
    try:
        found = _found(model, store, folder)
    except ValueError as error:
        logger.warning("%s", error)
        return None
    return found if found and found.adapter else None


def _found(model: AnyModel, store: KVStore, folder: Path | None) -> Recipe | None:
    path = store.path if isinstance(store, DirectoryStore) else None
    for place in _places(path, _sources(model), folder):
        is_own = folder is not None and place.parent == folder
        try:
            recipe = Recipe.load(place)
            if why := foreign(recipe, model):
                logger.warning("Skipped the recipe in %s. %s", place, why)
                continue
            check_fits(recipe, model)
        except (ValueError, OSError, UnsupportedModelError) as error:
            if is_own:
                raise
            logger.warning("Skipped the recipe in %s. %s", place, error)
            continue
        if not is_own:
            message = (
                f"recipe='auto' uses the recipe that was found in {place}: {recipe}. Pass this "
                "path as recipe= to silence this warning, or recipe='none' if you do not trust it."
            )
            _warn_once(model, message, about=str(place))
        return recipe
    shipped = _shipped().get(model.fingerprint)
    return _load_shipped(shipped) if shipped else None


def _sources(model: AnyModel) -> Iterator[str]:
    """Paths that the model may have been loaded from. A name without a folder, such as ``tiny``,
    only counts as a path if the weights were loaded from it: a label must not select files in the
    current directory that change answers."""
    loaded = str(getattr(model.config, "_name_or_path", ""))
    if model.name == loaded or is_gguf(Path(model.name)) or Path(model.name).name != model.name:
        yield model.name
    yield loaded


def _places(store: Path | None, models: Iterable[str], folder: Path | None) -> Iterator[Path]:
    folders = [folder, store, store and store.parent]
    for name in dict.fromkeys(models):
        path = Path(name).expanduser()
        if name and name not in SHORT_NAMES and path.exists():
            folders.append(path if path.is_dir() else path.parent)
    seen = set()
    for parent in folders:
        if parent is None or (resolved := parent.resolve()) in seen:
            continue
        seen.add(resolved)
        place = parent / RECIPE_FOLDER
        try:
            if stat.S_ISREG((place / RECIPE_FILE).stat().st_mode):
                yield place
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            if parent == folder:  # The caller loads this recipe, and raises the error.
                yield place


def known_digests(given: RecipeLike, store: str | Path | None, model: str) -> list[str]:
    """Find the digests of the recipes that an engine may use, without loading its model.

    For ``"auto"``: those of ``STOCK``, and of recipes next to the store or in the model's folder.
    Recipes shipped with the package are not included. Other values of ``given`` have one digest.
    """
    if isinstance(given, Recipe):
        return [given.digest]
    if given != AUTO:
        return [(_settings(given) or read_fields(Path(given).expanduser())).digest]
    digests = known_digests(STOCK, None, "")
    path = None if store is None else Path(store).expanduser()
    for place in _places(path, [model], None):
        with suppress(ValueError, OSError):
            digests.append(read_fields(place).digest)
    return digests


@cache
def _shipped() -> dict[str, Path]:
    return {
        fingerprint: path.parent
        for path in sorted(_SHIPPED.glob(f"*/{RECIPE_FILE}"))
        for fingerprint in read_fields(path.parent).fingerprints
    }


@cache
def _load_shipped(place: Path) -> Recipe:
    return replace(Recipe.load(place), source=f"shipped {place.name}")


def _warn_once(model: AnyModel, message: str, about: str = "") -> None:
    owner = model.hf_model if isinstance(model, BlockModel) else model
    warned = _warned_of.setdefault(owner, set())
    if about not in warned:
        warned.add(about)
        logger.warning("%s", message)


def _trade(model: AnyModel, recipe: Recipe, folder: Path | None) -> str:
    start = (
        f"{model.name} is not block-fine-tuned and has no recipe: block mode uses {str(recipe)!r}, "
    )
    repair = f"{_repair(model, folder)} creates a recipe for this model"
    if not recipe.recompute:
        return (
            f"{start}which costs nothing per answer, but is less accurate than full mode. "
            f"{repair}. Or use mode='full'."
        )
    return (
        f"{start}which recomputes {100 * recipe.recompute:g} % of the passages' tokens for each "
        "question, with attention to everything before them. `blockattn-rag eval` measures how "
        f"many of full mode's correct answers this keeps. The recipe {FAST!r} recomputes none. "
        f"{repair}."
    )


def _repair(model: AnyModel, folder: Path | None = None) -> str:
    of = f"--model {model.name} --passages FILE" if folder is None else f"--db {folder}"
    return f"`blockattn-rag repair {of}`"
