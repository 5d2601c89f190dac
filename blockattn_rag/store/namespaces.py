"""Namespaces: several tenants in one store, none of whom finds what another one stored.

The namespace is part of every key (``kv.store_key``). So whether a block is stored for one tenant
decides nothing for another, who can therefore not learn of it by timing either.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PRIVATE = "/private"  # no name holds a slash


def check_namespace(name: object) -> str:
    """The name as it stands; the empty one is the namespace of those who chose none.

    Raises:
        ValueError: it is no name.
    """
    if isinstance(name, str) and (name == "" or _NAME.fullmatch(name)):
        return name
    raise ValueError(
        "a namespace is named by 1 to 64 ASCII letters, digits, '.', '_' and '-', and starts with "
        f"a letter or digit, such as 'customer-17'; found {name!r:.80}"
    )


def is_of(namespace: str, names: Collection[str]) -> bool:
    """Whether an entry's namespace is one of these, or a private part of one."""
    return namespace.removesuffix(_PRIVATE) in names


@dataclass(frozen=True, slots=True)
class Access:
    """What an engine reads and writes of a store.

    Args:
        namespace: where it stores blocks, and looks for them first.
        read_namespaces: where it looks next, in this order: collections that several tenants share.
            They are never written.
        read_only: it stores nothing at all.

    Raises:
        ValueError: a namespace has no valid name.
        TypeError: ``read_namespaces`` is one string.
    """

    namespace: str = ""
    read_namespaces: Sequence[str] = ()
    read_only: bool = False

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if isinstance(self.read_namespaces, str):
            raise TypeError(
                f"read_namespaces is a list of names, found the string {self.read_namespaces!r}"
            )
        names = tuple(check_namespace(name) for name in self.read_namespaces)
        object.__setattr__(self, "read_namespaces", names)

    def namespaces(self, *, private: bool) -> tuple[str, ...]:
        """Where to look for a block, in order; the first one is where it is stored.

        ``private``: the block is no passage and no system message. Such blocks have a part of the
        namespace for themselves, in which they find each other alone: what a user writes must not
        tell him, by the time that it takes, which passages are stored.
        """
        if private:
            return (self.namespace + _PRIVATE,)
        return tuple(dict.fromkeys((self.namespace, *self.read_namespaces)))


OPEN = Access()
