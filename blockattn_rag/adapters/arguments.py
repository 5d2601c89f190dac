"""Checks of arguments that the frameworks themselves would accept silently."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any


def check_known(cls: type, given: Iterable[str], known: Collection[str]) -> None:
    """Check the names of keyword arguments.

    Raises:
        TypeError: some are unknown. The message suggests known names, and where options of
            ``generate`` go.
    """
    if not (unknown := sorted(set(given) - set(known))):
        return
    said = []
    for name in unknown:
        near = get_close_matches(name, known, n=1)
        said.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    places = (
        ". Options of transformers' generate, such as do_sample or repetition_penalty, go into "
        "generate_kwargs={...}, and those for loading the model into model_kwargs={...}"
    )
    has_places = "generate_kwargs" in known
    raise TypeError(f"{cls.__name__} has no argument {', '.join(said)}{places * has_places}")


def check_items(given: Iterable[Any], kind: type, advice: str) -> None:
    """Check the type of the items of a list.

    Args:
        given: The items.
        kind: The expected type.
        advice: End of the error message: what to do instead.

    Raises:
        TypeError: an item has another type.
    """
    for number, one in enumerate(given):
        if not isinstance(one, kind):
            raise TypeError(
                f"expected a list of {kind.__name__}, found {type(one).__name__} {one!r:.60} at "
                f"place {number}; {advice}"
            )
