"""Checks for invalid arguments that the frameworks would silently accept."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any


def check_known(cls: type, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for unknown keyword arguments, with a suggestion."""
    if not (unknown := sorted(set(given) - set(known))):
        return
    said = []
    for name in unknown:
        longer = [other for other in known if other.startswith(f"{name}_")]
        near = longer or get_close_matches(name, known, n=1)
        said.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    places = (
        ". Pass options of answers, such as mode, recipe or do_sample, in generate_kwargs={...}, "
        "and options for loading the model in model_kwargs={...}"
    )
    has_places = "generate_kwargs" in known
    raise TypeError(f"{cls.__name__} has no argument {', '.join(said)}{places * has_places}")


def check_items(given: Iterable[Any], kind: type, advice: str) -> None:
    """Raise TypeError, with ``advice``, if an item is not of type ``kind``."""
    for number, value in enumerate(given):
        if not isinstance(value, kind):
            raise TypeError(
                f"Expected a list of {kind.__name__}, found {type(value).__name__} {value!r:.60} "
                f"at index {number}; {advice}"
            )
