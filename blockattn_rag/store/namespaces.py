"""Namespaces, which isolate the tenants of a store: a namespace is part of every key, so response
times do not reveal which blocks are stored for other tenants."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PRIVATE = "/private"  # Not a valid name, because names cannot contain a slash.


def check_namespace(name: object) -> str:
    """Return ``name``, or raise ValueError if it is invalid. Empty: the default namespace."""
    if isinstance(name, str) and (name == "" or _NAME.fullmatch(name)):
        return name
    raise ValueError(
        "A namespace consists of 1 to 64 ASCII letters, digits, '.', '_' and '-', and starts with "
        f"a letter or digit, such as 'customer-17'; found {name!r:.80}"
    )


def is_of(namespace: str, names: Collection[str]) -> bool:
    """Whether an entry's namespace is in ``names``, or is the private part of one of them."""
    return namespace.removesuffix(_PRIVATE) in names


@dataclass(frozen=True, slots=True)
class Access:
    """Namespaces that an engine reads from and writes to.

    Args:
        namespace: Namespace to store blocks in, and to read first. Empty: the default namespace.
        read_namespaces: Shared namespaces to read next, in order. They are never written to.
        read_only: Whether the engine only reads, and stores no new blocks.
    """

    namespace: str = ""
    read_namespaces: Sequence[str] = ()
    read_only: bool = False

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if isinstance(self.read_namespaces, str):
            raise TypeError(
                "read_namespaces must be a list of names, found the string "
                f"{self.read_namespaces!r}"
            )
        names = tuple(check_namespace(name) for name in self.read_namespaces)
        object.__setattr__(self, "read_namespaces", names)

    def namespaces(self, *, private: bool) -> tuple[str, ...]:
        """Return the namespaces in which to look up a block, in order. Writes go to the first.

        Private blocks are neither passages nor system messages. They are kept in a separate part of
        the namespace, so that response times do not reveal to users which passages are stored.
        """
        if private:
            return (self.namespace + _PRIVATE,)
        return tuple(dict.fromkeys((self.namespace, *self.read_namespaces)))


OPEN = Access()
