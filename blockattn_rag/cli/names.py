"""Checks of model names as typed on the command line."""

from __future__ import annotations

from pathlib import Path


def existing_model(name: str | None) -> str | None:
    """The name as it stands, unless it is plainly a path and nothing is there.

    The hub's own message for a mistyped path speaks of repository ids.

    Raises:
        FileNotFoundError: no such folder.
    """
    if name and name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(
            f"no such model folder: {name}; expected a folder, a hub id, or 'bundled'"
        )
    return name
