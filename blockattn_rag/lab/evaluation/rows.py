"""Rows of an evaluation: full mode, block mode with each recipe, and prompts without passages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.find_recipe import RecipeLike, resolve_recipe
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Mode

FULL, CLOSED_BOOK, PLAIN = "full", "closed-book", "none"
"""Names of the rows for full mode, for prompts without passages, and for plain block mode."""

Recipes = Mapping[str, RecipeLike] | Sequence[RecipeLike]
"""Recipes by row name, or recipes that are named as they are written."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one row's prompts are answered.

    Args:
        name: Name of the row.
        recipe: Recipe of block mode. None: full mode.
        closed_book: Whether prompts hold no passages.
    """

    name: str
    recipe: Recipe | None = None
    closed_book: bool = False

    @property
    def mode(self) -> Mode:
        return "full" if self.recipe is None else "block"

    @property
    def digest(self) -> str:
        """Digest of the recipe; empty in full mode."""
        return "" if self.recipe is None else self.recipe.digest

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the engine's calls."""
        return {"mode": self.mode} | ({} if self.recipe is None else {"recipe": self.recipe})


def recipe_rows(engine: BlockAttentionEngine, recipes: Recipes) -> list[Row]:
    """The rows of recipes, in order, resolved for the engine's model.

    Raises:
        ValueError: A name comes twice or is reserved, or a recipe cannot be used with the model.
    """
    pairs = (
        [*recipes.items()]
        if isinstance(recipes, Mapping)
        else [(str(recipe), recipe) for recipe in recipes]
    )
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names) or not {FULL, CLOSED_BOOK}.isdisjoint(names):
        raise ValueError(
            f"Found the recipes {names}: expected distinct names other than {FULL!r} and "
            f"{CLOSED_BOOK!r}, which are rows of their own."
        )
    return [Row(name, resolve_recipe(given, engine.model, engine.store)) for name, given in pairs]
