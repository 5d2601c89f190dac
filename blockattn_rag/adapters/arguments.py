"""Arguments that are none: refused with what was found, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any


def check_known(cls: type, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse arguments that are not known.

    Raises:
        TypeError: names each of them, the nearest known one, and where options of ``generate`` go.
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
    """Refuse items of another kind.

    Raises:
        TypeError: names the first of them, and says ``advice``.
    """
    for number, one in enumerate(given):
        if not isinstance(one, kind):
            raise TypeError(
                f"expected a list of {kind.__name__}, found {type(one).__name__} {one!r:.60} at "
                f"place {number}; {advice}"
            )
