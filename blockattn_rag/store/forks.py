"""Forked processes: they have none of their parent's threads, nor what these were to do."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Renewable(Protocol):
    """What hands work to threads, or waits for what they do."""

    def renew(self) -> None:
        """Begin anew, with no thread at work and no lock held."""


_known: WeakSet[Renewable] = WeakSet()


def renew_in_child(one: Renewable) -> None:
    """Have ``one`` begin anew in every process that is forked from this one."""
    _known.add(one)


def _renew_all() -> None:
    for one in list(_known):
        one.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
