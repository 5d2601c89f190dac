"""What all tests share: repeatable examples."""

from __future__ import annotations

from hypothesis import settings

# Shared machines are slow at times; a deadline would fail on them by chance.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
