"""What looking after a store tells: of a million entries as short as of ten."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_NAMES = 100
"""How many names a ``Tally`` keeps."""


@dataclass(slots=True)
class Tally:
    """How many there are of something, and the names of the first ``MOST_NAMES``.

    Args:
        count: how many.
        first: the first ones' names (keys, or paths of temporary files), and what is to be said of
            each.
    """

    count: int = 0
    first: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        self.count += 1
        if len(self.first) < MOST_NAMES:
            self.first[name] = text

    def __bool__(self) -> bool:
        return self.count > 0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found.

    Args:
        ok: undamaged entries.
        total_bytes: their sizes, as they are stored.
        skipped: entries that were not read, because they are not in the sample.
        damaged: entries that cannot be used, and why.
        unread: entries that could not be read, for example for want of memory or permission. They
            may be sound, and are never deleted.
        deleted: how many of the damaged ones were deleted.
        errors: which of the damaged ones could not be deleted, and why.
        leftovers: temporary files of killed writers, or of writers at work. No harm; ``gc``
            removes old ones.
    """

    ok: int
    total_bytes: int
    skipped: int
    damaged: Tally
    unread: Tally
    deleted: int
    errors: Tally
    leftovers: Tally


@dataclass(frozen=True, slots=True)
class GcReport:
    """What ``gc`` did, or with ``dry_run`` would have done.

    Args:
        kept: entries that are referred to.
        kept_young: entries that are not, and were used within the grace period.
        deleted: entries deleted, and why.
        expired: how many of them were referred to, and not used for ``ttl_s``.
        freed_bytes: sizes of all that was deleted.
        leftovers: temporary files deleted.
        errors: what could not be read or deleted, and why. It is still there.
        dry_run: nothing was deleted.
        other: entries of other namespaces than the ones looked after, which were left alone.
    """

    kept: int
    kept_young: int
    deleted: Tally
    expired: int
    freed_bytes: int
    leftovers: Tally
    errors: Tally
    dry_run: bool
    other: int = 0


@dataclass(frozen=True, slots=True)
class ShrinkReport:
    """What ``shrink`` did, or with ``dry_run`` would have done.

    Args:
        left_bytes: what the remaining entries take.
        deleted: keys of the entries deleted, least recently used first.
        freed_bytes: what these took.
        dry_run: nothing was deleted.
    """

    left_bytes: int
    deleted: tuple[str, ...]
    freed_bytes: int
    dry_run: bool
